import json
from dataclasses import replace
from pathlib import Path

from twobw.training.metrics import BatchRow, MetricsWriter, StageAverages, StageRow, StageSummary

ROW = BatchRow(
    batch=0,
    loss=5.5,
    lr=0.001,
    tokens_per_second=1000.0,
    samples=16,
    stages=(StageRow(0.9, 2, 100), StageRow(0.8, 2, 200)),
)


def test_a_line_is_there_whole_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(ROW)
        assert json.loads(path.read_text()) == {
            "batch": 0,
            "loss": 5.5,
            "lr": 0.001,
            "tokens_per_second": 1000.0,
            "samples": 16,
            "stages": [
                {"busy_fraction": 0.9, "num_versions": 2, "peak_bytes": 100},
                {"busy_fraction": 0.8, "num_versions": 2, "peak_bytes": 200},
            ],
        }
        writer.write(ROW)
    assert len(path.read_text().splitlines()) == 2


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(replace(ROW, loss=float("nan")))
    assert json.loads(path.read_text())["loss"] is None


def test_averages_of_a_run() -> None:
    averages = StageAverages()
    averages.add((StageRow(0.5, 1, 300), StageRow(1.0, 2, 100)))
    averages.add((StageRow(0.75, 2, 200), StageRow(0.5, 2, 400)))
    assert averages.summaries([5, 6]) == (
        StageSummary(num_layers=5, busy_fraction=0.625, num_versions=2, peak_bytes=300),
        StageSummary(num_layers=6, busy_fraction=0.75, num_versions=2, peak_bytes=400),
    )
