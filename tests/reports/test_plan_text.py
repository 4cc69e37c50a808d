from pathlib import Path

import pytest

from tests.planner.support import layer, profile
from twobw.cli import main
from twobw.planner.plan import load_plan
from twobw.reports.plan_text import run_plan_command, split_text

CLUSTER = """
name = "a box"
devices_per_node = 4
device_memory_bytes = 16_000_000_000
[inside]
bytes_per_second = 10_000_000_000
latency_ns = 1000
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    entry = layer(
        forward_ns=10**6,
        backward_ns=2 * 10**6,
        num_parameters=10**8,
        stash_bytes=10**8,
        handed_bytes=10**6,
        sizes=(1, 2),
    )
    paths = tmp_path / "profile.json", tmp_path / "cluster.toml"
    paths[0].write_text(profile([entry], [0] * 8).to_json())
    paths[1].write_text(CLUSTER)
    return paths


def arguments(files: tuple[Path, Path], *more: str) -> list[str]:
    profile_file, cluster_file = map(str, files)
    return ["plan", "--profile", profile_file, "--cluster", cluster_file, *more]


def run(files: tuple[Path, Path], *more: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments(files, "--global-batch", "16", *more))
    return int(str(ended.value.code or 0))


def test_the_command(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "plan.json"
    text, code = run_plan_command(*files, 16, top=3, out=out)
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == "made up on a box: 4 devices of 16.0 GB, batches of 16 samples"
    plan = load_plan(out)
    assert lines[3].split()[:4] == ["1", str(plan.pp), str(plan.dp), plan.schedule]
    assert f"{plan.batch_ns / 1e6:.1f}" in lines[3]
    assert "older versions" in text
    assert "a batch's time: work" in text
    assert f"the best plan is in {out}" in text
    assert len([line for line in lines if line[:1].isdecimal()]) == 3


def test_what_does_not_fit_is_told(files: tuple[Path, Path]) -> None:
    text, _ = run_plan_command(*files, 16, memory_gb=6.0)
    assert "pp=1: stage 0 needs 12.9 GB of 6.0, even with dp=" in text


def test_nothing_fits(files: tuple[Path, Path], tmp_path: Path) -> None:
    text, code = run_plan_command(*files, 16, memory_gb=1.0, out=tmp_path / "none.json")
    assert code == 1
    assert "nothing fits" in text
    assert "devices with 3.3 GB for training instead of 1.0: pp=4 dp=1" in text
    assert "8 devices instead of 4" not in text  # a layer alone needs more
    assert not (tmp_path / "none.json").exists()


def test_from_the_command_line(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(files, "--cost-model", "paper", "--top", "2") == 0
    assert capsys.readouterr().out.count("2bw") >= 1
    assert run(files, "--memory", "0.5") == 1
    assert run(files, "--memory", "nan") == 2
    assert "--memory is nan; it must be above 0" in capsys.readouterr().err
    assert run(files, "--top", "0") == 2


@pytest.mark.parametrize(
    ("split", "text"), [((3, 4, 4, 4, 2), "3 4*3 2"), ((2, 2), "2*2"), ((5,), "5")]
)
def test_equal_stages_are_written_together(split: tuple[int, ...], text: str) -> None:
    assert split_text(split) == text
