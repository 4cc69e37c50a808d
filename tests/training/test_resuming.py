"""What a run may go on with, and where it is found."""

import json
from pathlib import Path

import pytest

from tests.config.files import write
from twobw.cli import main
from twobw.config import load_config
from twobw.training.metrics import BatchRow, MetricsWriter, StageRow, ValidationRow
from twobw.training.resuming import (
    Start,
    check_resumed,
    folder_before_restart,
    launcher_file,
    open_run,
)
from twobw.training.run_folder import create_run_folder, folders_of


def begun(folder: Path, **changes: dict[str, object]) -> Path:
    """A run that has no checkpoint yet."""
    run = {"folder": str(folder / "runs"), "name": "first"}
    config = load_config(write(folder, run=run, **changes))
    return open_run(config, {}, None).folder


def refused(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", *tokens])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "value", "was"),
    [
        ("optimizer.lr", "0.02", "0.01"),
        ("model.width", "64", "32"),
        ("training.seed", "3", "0"),
        ("training.precision", "bf16", '"fp32"'),
        ("data.validation_fraction", "0.1", "0.05"),
        ("run.name", "other", '"first"'),
        ("training.num_batches", "9", "5"),
    ],
)
def test_what_makes_it_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, value: str, was: str
) -> None:
    run = begun(tmp_path)
    said = refused(capsys, "--resume", str(run), f"--{setting}", value, "--parallel.pp", "1")
    assert said.startswith(f"twobw: --resume {run}: 1 problem\n  {setting} = ")
    assert f": was {was}, which a run that goes on keeps" in said


def test_the_layout_may_change(tmp_path: Path) -> None:
    run = begun(tmp_path, optimizer={"lr": 0.01, "decay": "constant"})
    settings = {
        "parallel.pp": "1",
        "parallel.dp": "3",
        "parallel.schedule": "1f1b",
        "parallel.lookahead": "0.0",
        "training.global_batch_size": "12",
        "training.num_batches": "9",  # at a constant rate
        "checkpoint.every": "1",
    }
    check_resumed(run, load_config(run / "config.toml", settings), "the text")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not the folder of a run" in refused(capsys, "--resume", str(tmp_path))
    both = refused(capsys, "one.toml", "--resume", str(tmp_path))
    assert (
        both
        == refused(capsys)
        == ("twobw: train takes a TOML file, or --resume and the folder of a run\n")
    )


def test_a_run_goes_on_in_its_folder_wherever_that_is(tmp_path: Path) -> None:
    run = begun(tmp_path)
    moved = run.rename(tmp_path / "moved")
    config = load_config(moved / "config.toml")
    for name in ("summary.json", "rank1.failure.json"):
        (moved / name).write_text("{}")
    assert open_run(config, {"plan.json": "{}"}, moved).folder == moved
    assert not run.exists()
    assert {path.name for path in moved.iterdir()} == {"config.toml", "plan.json"}


def test_the_folder_of_a_restarted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(write(tmp_path, run={"folder": str(tmp_path / "runs"), "name": "a.b"}))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    open_run(config, launcher_file(), None)
    own = open_run(config, launcher_file(), None).folder
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    open_run(config, launcher_file(), None)
    create_run_folder(tmp_path / "runs", "a.b-x")
    open_run(config, {}, None)  # started otherwise
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert folder_before_restart(config) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert folder_before_restart(config) == own == tmp_path / "runs/a.b-2"
    names = [path.name for path in folders_of(tmp_path / "runs", "a.b")]
    assert names == ["a.b-4", "a.b-3", "a.b-2", "a.b"]


def test_the_position_in_the_data_is_in_samples() -> None:
    start = Start(batch=10, samples=80)
    assert [start.position(batch, 12) for batch in (10, 11, 13)] == [80, 92, 116]


def test_metrics_go_on_without_a_line_twice(tmp_path: Path) -> None:
    stages = (StageRow(0.5, 2, 7),)
    rows: list[BatchRow | ValidationRow] = [ValidationRow(0, 0, 5.0, 148.0)]
    for batch in range(4):
        rows.append(BatchRow(batch, float("nan"), None, 0.1, 9.0, 1.0, None, 8 * batch, 0, stages))
        rows.append(ValidationRow(batch + 1, 8 * batch, 4.0, 54.0))
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        for row in rows:
            metrics.write(row)
    whole = path.read_text()
    path.write_text(whole + '{"batch": 4, "lo')
    with MetricsWriter(path) as metrics:
        kept = metrics.go_on_from(3)
        for row in rows[7:]:
            metrics.write(row)
    assert [repr(row) for row in kept] == [repr(row) for row in rows[:7]]
    assert path.read_text() == whole
    with MetricsWriter(path) as metrics:
        assert metrics.go_on_from(0) == []
    assert path.read_text() == ""
    assert json.loads(whole.splitlines()[1])["loss"] is None
