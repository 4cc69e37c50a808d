"""What a run measures: a line a batch while it goes, a summary when it ends."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from twobw.training.run_folder import write_text


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage in one batch; of its replicas, the first.

    Attributes:
        busy_fraction: part of the batch's time in forwards, backwards and updates, waits excluded.
        num_versions: weight versions held.
        peak_bytes: the most memory the stage has used so far: allocated on a GPU, else resident in
            its process beyond interpreter and libraries.
    """

    busy_fraction: float
    num_versions: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch's line of ``metrics.jsonl``. Figures that are not finite are null there.

    Attributes:
        batch: 0-based.
        loss: training loss, mean over the global batch (in the summary's ``loss_unit``).
        grad_norm: global norm of the gradient before clipping; None where it is not clipped, and
            for an update that fp16 skipped.
        lr: the learning rate that this batch's update uses.
        tokens_per_second: of this batch, by stage 0's clock, all ranks together.
        tflops: 10**12 floating-point operations a second, of one rank.
        mfu: these as a part of what the rank's device can do at most in 16 bits; None where that is
            not known, and in fp32.
        samples: trained on since the start of the run, this batch included.
        num_skipped: updates that were left out since the start, this batch's included.
        stages: by stage.
    """

    batch: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens_per_second: float
    tflops: float
    mfu: float | None
    samples: int
    num_skipped: int
    stages: tuple[StageRow, ...]

    @property
    def peak_bytes(self) -> int:
        """The most memory that a stage's process has used so far."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The part of the batch that each stage was idle."""
        return tuple(max(1.0 - stage.busy_fraction, 0.0) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """An evaluation's line of ``metrics.jsonl``.

    Attributes:
        num_batches: trained before it.
        samples: trained on before it.
        validation_loss: mean over the validation batches (in the summary's ``loss_unit``).
        validation_perplexity: its exponential.
        validation_accuracy: the part of the validation samples whose class was told; None where
            the model tells no classes.
    """

    num_batches: int
    samples: int
    validation_loss: float
    validation_perplexity: float
    validation_accuracy: float | None = None


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinite where that is too large for a number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def finite(value: float | None) -> float | None:
    """The value, or None where it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


class MetricsWriter:
    """Appends lines to ``metrics.jsonl``; each is there, whole, when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("a", encoding="utf-8")

    def go_on_from(self, num_batches: int) -> list[BatchRow | ValidationRow]:
        """Drop the lines of what comes after so many batches, since it is trained once more.

        Returns:
            The others.
        """
        self._stream.close()
        lines = self._path.read_text("utf-8").splitlines(keepends=True)
        kept = [(line, row) for line in lines if (row := _row_before(line, num_batches))]
        write_text(self._path, "".join(line for line, _ in kept))
        self._stream = self._path.open("a", encoding="utf-8")
        return [row for _, row in kept]

    def write(self, row: BatchRow | ValidationRow) -> None:
        """Append one line."""
        figures = {
            name: finite(value) if isinstance(value, float) else value
            for name, value in asdict(row).items()
        }
        self._stream.write(json.dumps(figures) + "\n")
        self._stream.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()


def _row_before(line: str, num_batches: int) -> BatchRow | ValidationRow | None:
    """What a line holds, if it is of the first ``num_batches``; ``None``, too, for one that was cut
    short. Losses that are null are NaN again."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if "validation_loss" in fields:
        is_before = num_batches > 0 and fields["num_batches"] <= num_batches
        fields = _with_nan(fields, "validation_loss", "validation_perplexity")
        return ValidationRow(**fields) if is_before else None
    if fields["batch"] >= num_batches:
        return None
    fields = _with_nan(fields, "loss")
    return BatchRow(**{**fields, "stages": tuple(StageRow(**row) for row in fields["stages"])})


def _with_nan(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The inverse of `finite`, as far as can be."""
    return fields | {name: math.nan for name in names if fields[name] is None}


class RecentBatches:
    """The batches since the last that was shown, in constant memory: one alone says little of
    the speed."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._count = 0
        self._inverse_speeds = 0.0
        self._averages = StageAverages()

    def add(self, row: BatchRow) -> None:
        """Take in one batch; all have the same number of tokens."""
        self._last = row
        self._count += 1
        self._inverse_speeds += 1 / row.tokens_per_second
        self._averages.add(row.stages)

    def take(self) -> BatchRow:
        """The last of them, with the mean speed and busy fractions of all; then forget them."""
        last = self._last
        speed = self._count / self._inverse_speeds
        factor = speed / last.tokens_per_second
        row = replace(
            last,
            tokens_per_second=speed,
            tflops=last.tflops * factor,
            mfu=None if last.mfu is None else last.mfu * factor,
            stages=self._averages.stages(),
        )
        self._forget()
        return row


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage over the run: mean busy fraction, most versions held, peak memory."""

    num_layers: int
    busy_fraction: float
    num_versions: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """``summary.json``: how a run ended. Losses that are not finite are None.

    Attributes:
        schedule: its name.
        num_batches: batches trained.
        samples: samples trained on.
        tokens: tokens trained on.
        num_skipped: updates that were left out: fp16 overflowed, or as on_divergence says.
        is_stopped_early: whether it ended before the last batch of the config: it was asked to,
            or it failed.
        failure: why there was no use in going on, and what to try; None where all went well.
        validation_loss_start: loss before training; None where none was asked for.
        validation_loss_end: the same after it.
        validation_loss_best: the lowest of those after the start.
        best_num_batches: how many batches had been trained then.
        validation_accuracy_start: part of the validation samples whose class was told before
            training; None where the model tells no classes.
        validation_accuracy_end: the same after it.
        train_loss_end: training loss of the last batch.
        loss_unit: what losses are measured in: nats a byte, a masked byte or a snippet.
        tokens_per_second: all tokens over the time in `train_seconds`.
        train_seconds: from the first batch's start to the drain's end, evaluations left out.
        stages: by stage.
        prompt: what the trained model was asked to go on with; empty where it writes no text.
        sample: the text that it wrote, the prompt included.
    """

    schedule: str
    num_batches: int
    samples: int
    tokens: int
    num_skipped: int
    is_stopped_early: bool
    failure: str | None
    validation_loss_start: float | None
    validation_loss_end: float | None
    validation_loss_best: float | None
    best_num_batches: int | None
    validation_accuracy_start: float | None
    validation_accuracy_end: float | None
    train_loss_end: float | None
    loss_unit: str
    tokens_per_second: float
    train_seconds: float
    stages: tuple[StageSummary, ...]
    prompt: str
    sample: str


class StageAverages:
    """Keeps the running figures of each stage, in constant memory."""

    def __init__(self) -> None:
        self._sums: tuple[StageRow, ...] = ()  # busy fractions are added, the rest are maxima
        self._count = 0

    def add(self, stages: tuple[StageRow, ...]) -> None:
        """Take in one batch."""
        self._count += 1
        if not self._sums:
            self._sums = stages
            return
        self._sums = tuple(
            StageRow(
                old.busy_fraction + new.busy_fraction,
                max(old.num_versions, new.num_versions),
                max(old.peak_bytes, new.peak_bytes),
            )
            for old, new in zip(self._sums, stages, strict=True)
        )

    def stages(self) -> tuple[StageRow, ...]:
        """The figures so far."""
        return tuple(
            replace(sums, busy_fraction=sums.busy_fraction / self._count) for sums in self._sums
        )

    def summaries(self, split: list[int]) -> tuple[StageSummary, ...]:
        """The figures so far; ``split`` gives each stage's layers."""
        return tuple(
            StageSummary(layers, stage.busy_fraction, stage.num_versions, stage.peak_bytes)
            for layers, stage in zip(split, self.stages(), strict=True)
        )
