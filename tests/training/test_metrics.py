import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from twobw.training.metrics import (
    BatchRow,
    MetricsWriter,
    RecentBatches,
    StageAverages,
    StageRow,
    StageSummary,
    ValidationRow,
    perplexity,
)

ROW = BatchRow(
    batch=0,
    loss=5.5,
    grad_norm=1.5,
    lr=0.001,
    tokens_per_second=1000.0,
    tflops=0.5,
    mfu=0.25,
    samples=16,
    num_skipped=0,
    stages=(StageRow(0.75, 2, 100), StageRow(1.01, 2, 200)),
)


def test_a_line_is_there_whole_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(ROW)
        assert json.loads(path.read_text()) == {
            "batch": 0,
            "loss": 5.5,
            "grad_norm": 1.5,
            "lr": 0.001,
            "tokens_per_second": 1000.0,
            "tflops": 0.5,
            "mfu": 0.25,
            "samples": 16,
            "num_skipped": 0,
            "stages": [
                {"busy_fraction": 0.75, "num_versions": 2, "peak_bytes": 100},
                {"busy_fraction": 1.01, "num_versions": 2, "peak_bytes": 200},
            ],
        }
        writer.write(ValidationRow(1, 16, 2.0, 7.4))
    assert json.loads(path.read_text().splitlines()[1]) == {
        "num_batches": 1,
        "samples": 16,
        "validation_loss": 2.0,
        "validation_perplexity": 7.4,
        "validation_accuracy": None,
    }


def test_figures_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(replace(ROW, loss=math.nan, grad_norm=math.inf, mfu=None))
        writer.write(ValidationRow(1, 16, math.nan, math.nan))
    batch, validation = map(json.loads, path.read_text().splitlines())
    assert (batch["loss"], batch["grad_norm"], batch["mfu"], batch["lr"]) == (
        None,
        None,
        None,
        0.001,
    )
    assert validation["validation_loss"] is None


def test_a_row_knows_its_peak_and_its_bubbles() -> None:
    assert ROW.peak_bytes == 200
    assert ROW.bubbles == (0.25, 0.0)


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(256)) == pytest.approx(256)
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_averages_of_a_run() -> None:
    averages = StageAverages()
    averages.add((StageRow(0.5, 1, 300), StageRow(1.0, 2, 100)))
    averages.add((StageRow(0.75, 2, 200), StageRow(0.5, 2, 400)))
    assert averages.summaries([5, 6]) == (
        StageSummary(num_layers=5, busy_fraction=0.625, num_versions=2, peak_bytes=300),
        StageSummary(num_layers=6, busy_fraction=0.75, num_versions=2, peak_bytes=400),
    )


def test_what_is_shown_averages_the_batches_since_the_last() -> None:
    recent = RecentBatches()
    recent.add(replace(ROW, tokens_per_second=1.0))
    recent.take()
    recent.add(replace(ROW, tokens_per_second=1000.0, stages=(StageRow(0.5, 1, 300),)))
    last = replace(ROW, tokens_per_second=500.0, loss=4.0, stages=(StageRow(0.25, 2, 200),))
    recent.add(last)
    shown = recent.take()
    factor = 4 / 3  # a batch of 1000 tokens took 1 s, the next 2 s: 2000 in 3 s
    assert shown == replace(
        last,
        tokens_per_second=pytest.approx(500 * factor),
        tflops=pytest.approx(0.5 * factor),
        mfu=pytest.approx(0.25 * factor),
        stages=(StageRow(0.375, 2, 300),),
    )
