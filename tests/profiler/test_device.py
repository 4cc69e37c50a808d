"""Descriptions of devices: the ones that there are, and files."""

import pytest

from twobw.profiler.device import DEVICES, DeviceError, find_device

DESCRIPTION = """
name = "mine"
memory_bytes_per_second = 1e11
half_efficiency_tokens = 100
[matrix.fp32]
flops_per_second = 1e12
efficiency = 0.7
"""


def test_devices_by_name():
    assert list(DEVICES) == ["v100-16gb", "a100-40gb", "a100-80gb", "h100-80gb"]
    # the whole models that the efficiency is taken from (its comment) lie around it
    v100 = find_device("v100-16gb").flops_per_second("fp16", 8192)
    assert 39e12 < v100 < 64e12
    a100 = find_device("a100-80gb").flops_per_second("bf16", 8192)
    assert 130e12 < a100 < 163e12


def test_a_device_in_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(DESCRIPTION)
    assert find_device(str(path)).flops_per_second("fp32", 100) == pytest.approx(0.35e12)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "mine"', "", "name: Field required"),
        ("1e11", "-1", "memory_bytes_per_second: .*greater than 0"),
        ("0.7", "1.7", r"matrix\.fp32\.efficiency: .*less than or equal to 1"),
        ('name = "mine"', 'name = "mine"\nspeed = 3', "speed: Extra inputs"),
        ("[matrix.fp32]", "[matrix.fp32", "cannot be read as TOML"),
    ],
)
def test_a_faulty_description_is_refused(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    path.write_text(DESCRIPTION.replace(old, new))
    with pytest.raises(DeviceError, match=message):
        find_device(str(path))


def test_an_unknown_device_is_refused():
    with pytest.raises(DeviceError, match=r"'v100' is not one of v100-16gb, .*no such file"):
        find_device("v100")
