import pytest
import torch

from twobw.training.device import move, own_device, peak_flops, peak_flops_of
from twobw.training.placement import Placement

CPU = torch.device("cpu")


@pytest.mark.parametrize(("num_samples", "dp"), [(8, 2), (7, 3), (11, 4), (3, 3), (5, 1)])
def test_parts_are_those_of_tensor_split(num_samples: int, dp: int) -> None:
    samples = torch.arange(num_samples)
    for replica, expected in enumerate(samples.tensor_split(dp)):
        first, count = Placement(replica, dp, True, True, CPU).part(num_samples)
        assert torch.equal(samples[first : first + count], expected)


def test_a_stage_gets_what_it_needs() -> None:
    batch = (torch.zeros(1), torch.ones(1))
    needed = [
        Placement(0, 1, first, last, CPU).needed(batch)
        for first, last in [(True, False), (False, True), (False, False), (True, True)]
    ]
    assert needed == [(batch[0], None), (None, batch[1]), (None, None), batch]
    assert move(batch[0], CPU) is batch[0]


def test_without_gpus_a_rank_is_on_the_cpu_of_unknown_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert own_device() == CPU
    assert peak_flops(CPU) is None


def test_a_rank_has_the_gpu_of_its_place_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RuntimeError, match="local rank 2 has no GPU: this machine has 2"):
        own_device()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("NVIDIA L4", 121),
    ],
)
def test_peaks_of_common_gpus(name: str, tflops: float) -> None:
    assert peak_flops_of(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA A10G", "NVIDIA GeForce GTX 1080"])
def test_a_gpu_that_is_not_in_the_table_has_no_known_peak(name: str) -> None:
    assert peak_flops_of(name) is None
