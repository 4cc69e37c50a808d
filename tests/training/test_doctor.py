"""What the doctor finds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from twobw.cli import main
from twobw.training import doctor
from twobw.training.doctor import Finding, Link


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_each_problem_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.versions().remedy == ""
    assert doctor.clock().remedy == ""
    assert doctor.disk(tmp_path / "not" / "yet").remedy == ""
    assert "train with at most" in doctor.processors(10**6).remedy
    assert "end other programs" in doctor.memory(10**6).remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 9, 1))
    assert "--shm-size=1g" in doctor.shared_memory().remedy
    assert "little room" in doctor.disk(tmp_path).remedy
    (tmp_path / "file").touch()
    assert "cannot be written to; set run.folder" in doctor.disk(tmp_path / "file" / "x").remedy


def test_a_slow_link_and_a_clock_that_is_off() -> None:
    good = Link(latency_s=1e-4, bytes_per_second=1e9, skew_s=0.002)
    assert doctor.link_finding("link", good, same_clock=False) == Finding(
        "link", "100 us, 1,000 MB/s, clock off by +2.0 ms"
    )
    assert (
        "extra_in_flight"
        in doctor.link_finding("link", Link(0.1, 1e9, 0.0), same_clock=True).remedy
    )
    assert "NTP" in doctor.link_finding("link", Link(1e-4, 1e9, -3.0), same_clock=False).remedy


def test_the_table_and_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real link, between this process and another."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(doctor, "_LATENCY_S", 10.0)  # on a machine that does much besides
    monkeypatch.setattr(doctor, "_BANDWIDTH", 1.0)
    monkeypatch.setattr(doctor, "_FSYNC_S", 60.0)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--folder", str(tmp_path), "--ranks", "1"])
    out = capsys.readouterr().out
    assert ended.value.code in (0, None), out
    rows = out.splitlines()
    assert rows[0].split() == ["what", "found"]
    assert [row.split("  ")[0] for row in rows[1:9]] == [
        "versions",
        "processor cores",
        "GPUs",
        "memory available",
        "shared memory",
        "clock",
        "disk",
        "link between ranks",
    ]
    assert rows[-1] == "all is well"
    monkeypatch.setattr(doctor, "local_link", lambda: Finding("link", "none", "mend it"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--folder", str(tmp_path), "--ranks", "1"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "link: mend it"
