"""This machine as a cluster, and ``twobw cluster``."""

from pathlib import Path

import pytest

from twobw import cli
from twobw.planner.cluster import load_cluster
from twobw.profiler.profile import LinkProfile
from twobw.training.machine import local_cluster, num_local_devices


def test_this_machine_as_a_cluster() -> None:
    link = LinkProfile(latency_ns=5, bytes_per_second=2e9)
    one, three = local_cluster(link, 1), local_cluster(link, 3)
    assert (three.num_devices, three.inside) == (3, link)
    ratio = one.device_memory_bytes / three.device_memory_bytes
    assert 2.5 < ratio < 3.5  # other programs come and go


def test_a_device_is_as_many_cores_as_a_rank_has_threads() -> None:
    assert num_local_devices(1) >= num_local_devices(2) >= 1
    assert num_local_devices(10**6) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --measure"),
        (["--measure", "--threads", "0"], "--threads is 0; it must be at least 1"),
        (["--measure", "--out", "."], "is a folder; give the description the name of a file"),
    ],
)
def test_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        cli.main(["cluster", *arguments])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_measured_description_is_one_that_plan_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twobw.profiler.command.num_local_devices", lambda threads: 2)
    path = tmp_path / "here" / "cluster.toml"
    with pytest.raises(SystemExit) as exited:
        cli.main(["cluster", "--measure", "--out", str(path)])
    assert exited.value.code == 0
    assert f"the description is in {path}" in capsys.readouterr().out
    spec = load_cluster(path)
    assert spec.num_devices == 2
    assert 1e6 < spec.inside.bytes_per_second < 1e12
    assert 0 < spec.inside.latency_ns < 1e9
