"""What a run measures: a line a batch while it goes, a summary when it ends."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage in one batch.

    Attributes:
        busy_fraction: part of the batch's time in forwards, backwards and updates, waits excluded.
        num_versions: weight versions held.
        peak_bytes: the most memory the stage's process has used so far.
    """

    busy_fraction: float
    num_versions: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One line of ``metrics.jsonl``.

    Attributes:
        batch: 0-based.
        loss: training loss, mean over the batch (nats a byte); null if it is not finite.
        lr: the learning rate that this batch's update uses.
        tokens_per_second: of this batch, by stage 0's clock, all replicas together.
        samples: trained on since the start of the run, this batch included.
        stages: by stage.
    """

    batch: int
    loss: float
    lr: float
    tokens_per_second: float
    samples: int
    stages: tuple[StageRow, ...]


def finite(value: float | None) -> float | None:
    """The value, or None where it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


class MetricsWriter:
    """Appends lines to ``metrics.jsonl``; each is there, whole, when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a", encoding="utf-8")

    def write(self, row: BatchRow) -> None:
        """Append one batch."""
        self._stream.write(json.dumps(asdict(row) | {"loss": finite(row.loss)}) + "\n")
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


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage over the run: mean busy fraction, most versions held, peak memory."""

    num_layers: int
    busy_fraction: float
    num_versions: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """``summary.json``: how a run ended.

    Attributes:
        schedule: its name.
        num_batches: batches trained.
        samples: samples trained on.
        tokens: tokens trained on.
        is_stopped_early: whether it was asked to stop before the last batch of the config.
        validation_loss_start: nats a byte before training; None where none was asked for.
        validation_loss_end: the same after it.
        train_loss_end: training loss of the last batch. Losses that are not finite are None.
        tokens_per_second: all tokens over the time from the first batch's start to the drain's end.
        train_seconds: that time.
        stages: by stage.
        prompt: what the trained model was asked to go on with.
        sample: the text that it wrote, the prompt included.
    """

    schedule: str
    num_batches: int
    samples: int
    tokens: int
    is_stopped_early: bool
    validation_loss_start: float | None
    validation_loss_end: float | None
    train_loss_end: float | None
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

    def summaries(self, split: list[int]) -> tuple[StageSummary, ...]:
        """The figures so far; ``split`` gives each stage's layers."""
        return tuple(
            StageSummary(
                layers, sums.busy_fraction / self._count, sums.num_versions, sums.peak_bytes
            )
            for layers, sums in zip(split, self._sums, strict=True)
        )
