"""Metrics for TensorBoard are read back by TensorBoard itself."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from twobw.training.metrics import BatchRow, StageRow, ValidationRow
from twobw.training.tensorboard import TensorBoard

ROW = BatchRow(
    batch=9,
    loss=2.5,
    grad_norm=0.75,
    lr=0.001,
    tokens_per_second=2000.0,
    tflops=0.5,
    mfu=0.25,
    samples=160,
    num_skipped=0,
    stages=(StageRow(0.75, 2, 2**29), StageRow(0.5, 2, 2**30)),
)


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tags_are_those_of_torchtitan(tmp_path: Path) -> None:
    with TensorBoard(tmp_path, num_ranks=4, sequence_length=32) as board:
        board.write_batch(ROW)
        board.write_validation(ValidationRow(10, 160, 2.0, 7.5))
    expected = {
        "loss_metrics/global_avg_loss": 2.5,
        "grad_norm": 0.75,
        "lr": 0.001,
        "n_tokens_seen": 160 * 32,
        "throughput(tps)": 500.0,
        "tflops": 0.5,
        "mfu(%)": 25.0,
        "memory/max_active(GiB)": 1.0,
        "bubble(%)/stage0": 25.0,
        "bubble(%)/stage1": 50.0,
        "validation_metrics/loss": 2.0,
        "validation_metrics/perplexity": 7.5,
    }
    assert scalars_of(tmp_path) == {
        tag: [(10, pytest.approx(value))] for tag, value in expected.items()
    }


def test_what_is_not_known_has_no_tag(tmp_path: Path) -> None:
    row = BatchRow(0, 2.5, None, 0.001, 2000.0, 0.5, None, 16, 0, ROW.stages)
    with TensorBoard(tmp_path, num_ranks=1, sequence_length=32) as board:
        board.write_batch(row)
    tags = scalars_of(tmp_path)
    assert "loss_metrics/global_avg_loss" in tags
    assert not {"grad_norm", "mfu(%)"} & set(tags)
