"""When a run is given up, and what is said."""

import math
from pathlib import Path

import pytest

from tests.config.files import write
from twobw.config import load_config
from twobw.runtime.finiteness import NonFinite
from twobw.training.divergence import Divergence

REMEDIES = (
    "a lower optimizer.lr (now 0.01), more optimizer.warmup_batches (now 0), or "
    "training.max_grad_norm = 1.0 (now 0, no clipping)"
)


def watch(folder: Path, **changes: dict[str, object]) -> Divergence:
    return Divergence(load_config(write(folder, **changes)))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_the_first_loss_that_is_not_finite_is_named(tmp_path: Path, loss: float) -> None:
    divergence = watch(tmp_path)
    divergence.add(0, 5.5, is_skipped=False)
    assert divergence.failure is None
    divergence.add(1, loss, is_skipped=False)
    divergence.add(2, math.nan, is_skipped=False)
    divergence.end(3, math.nan, has_finite_weights=False)
    assert divergence.failure == f"the loss is {loss} at step 2; try {REMEDIES}"


def test_batches_that_fp16_skips_do_no_harm_unless_there_is_no_end_to_them(tmp_path: Path) -> None:
    divergence = watch(tmp_path, training={"precision": "fp16"})
    divergence.add(0, math.nan, is_skipped=True)
    divergence.add(1, 5.5, is_skipped=False)
    for batch in range(2, 51):
        divergence.add(batch, math.inf, is_skipped=True)
    assert divergence.failure is None
    divergence.add(51, 5.5, is_skipped=True)
    assert divergence.failure == (
        "fp16 has skipped the last 50 updates, up to step 52, since gradients overflow at any loss "
        f'scale; try training.precision = "bf16", {REMEDIES}'
    )


def test_where_it_began_is_told_at_the_end(tmp_path: Path) -> None:
    divergence = watch(tmp_path)
    divergence.add(4, math.nan, is_skipped=False)
    divergence.end(6, math.nan, False, NonFinite(4, 2, 1, stage=0, replica=0, version=3))
    assert divergence.failure == (
        "the loss is nan at step 5 (first in step 5, batch 4: block 0 (layer 1) on stage 0 gave "
        f"values that are not finite, in microbatch 2, on weight version 3); try {REMEDIES}"
    )


@pytest.mark.parametrize("wish", ["skip", "continue"])
def test_a_run_may_go_on(tmp_path: Path, wish: str) -> None:
    divergence = watch(tmp_path, training={"on_divergence": wish})
    assert divergence.add(0, 5.0, is_skipped=False) is None
    is_skipped = wish == "skip"
    what = "its update is left out" if is_skipped else "training goes on"
    for batch in range(1, 50):
        note = divergence.add(batch, math.nan, is_skipped=is_skipped)
        assert note == f"the loss is nan at step {batch + 1}; {what}"
    assert divergence.failure is None
    divergence.add(50, math.nan, is_skipped=is_skipped)
    assert divergence.failure == (
        "the last 50 updates, up to step 51, were left out, since their gradients are not finite; "
        f"try {REMEDIES}"
        if is_skipped
        else None
    )


@pytest.mark.parametrize(
    ("loss", "has_finite_weights", "what"),
    [
        (2.0, True, None),
        (math.nan, True, "validation loss is"),
        (2.0, False, "weights are"),
        (math.nan, False, "weights are"),
    ],
)
def test_the_last_update_may_be_the_one_too_many(
    tmp_path: Path, loss: float, has_finite_weights: bool, what: str | None
) -> None:
    divergence = watch(tmp_path)
    divergence.end(5, loss, has_finite_weights)
    expected = what and f"the {what} not finite after step 5; try {REMEDIES}"
    assert divergence.failure == expected


def test_the_remedies_fit_the_config(tmp_path: Path) -> None:
    optimizer: dict[str, object] = {"name": "muon", "matrix_lr": 0.5, "warmup_batches": 3}
    divergence = watch(tmp_path, optimizer=optimizer, training={"max_grad_norm": 2.0})
    divergence.add(7, math.nan, is_skipped=False)
    assert divergence.failure == (
        "the loss is nan at step 8; try a lower optimizer.lr (now 0.01) and optimizer.matrix_lr "
        "(now 0.5), more optimizer.warmup_batches (now 3), or a lower training.max_grad_norm "
        "(now 2.0)"
    )
