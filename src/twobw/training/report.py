"""What rank 0 shows and writes while a run goes and when it ends."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from safetensors.torch import save_file
from torch import Tensor

import twobw
from twobw.config import Config
from twobw.core.timeline import Timeline
from twobw.models.gpt import gpt, num_parameters
from twobw.reports.perfetto import chrome_trace
from twobw.runtime.results import StepResult
from twobw.training.data import TextData
from twobw.training.metrics import BatchRow, MetricsWriter, StageAverages, StageRow, Summary, finite
from twobw.training.optimizer import lr_at
from twobw.training.progress import Progress, duration, make_progress
from twobw.training.run_folder import (
    METRICS,
    SUMMARY,
    TIMELINE,
    WEIGHTS,
    replacing,
    write_json,
)
from twobw.training.sampling import generate

PROMPT = "def "
_SAMPLE_TOKENS = 200
_PACKAGE = str(Path(twobw.__file__).parent)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to, on rank 0.

    Attributes:
        seconds: from the first batch's start to the drain's end.
        loss_start: validation loss before training, None where none was asked for.
        loss_end: the same after it.
        weights: under the model's own names.
        timeline: of the last batches.
    """

    seconds: float
    loss_start: float | None
    loss_end: float | None
    weights: dict[str, Tensor]
    timeline: Timeline


@contextmanager
def open_report(config: Config, folder: Path) -> Iterator[RunReport]:
    """Rank 0's report of a run, on standard output; warnings of this package are shown too."""
    training = config.training
    progress = make_progress(sys.stdout, training.num_batches, training.log_every)
    with (
        MetricsWriter(folder / METRICS) as metrics,
        closing(progress),
        _warnings_noted(progress),
    ):
        yield RunReport(config, folder, metrics, progress)


class RunReport:
    """Takes in a run's figures, shows them, and writes the files of the run's folder."""

    def __init__(
        self, config: Config, folder: Path, metrics: MetricsWriter, progress: Progress
    ) -> None:
        self._config = config
        self._folder = folder
        self._averages = StageAverages()
        self._split: list[int] = []
        self._metrics = metrics
        self._progress = progress
        self._num_batches = 0
        self._loss = math.nan

    def begin(self, data: TextData, split: list[int], loss_start: float | None) -> None:
        """Say what will be trained on what."""
        config, parallel = self._config, self._config.parallel
        self._split = split
        self._progress.note(
            f"{config.model.name}: {num_parameters(config.model.gpt()):,} parameters in "
            f"{parallel.pp} stages of {split} layers; {parallel.schedule}, "
            f"{parallel.num_microbatches} microbatches"
        )
        self._progress.note(
            f"text: {data.num_files:,} files, {len(data.train):,} bytes to train on, "
            f"{len(data.validation):,} to validate"
        )
        if loss_start is not None:
            self._progress.note(f"validation loss {loss_start:.4f} nats a byte")

    def add(self, result: StepResult, seconds: float) -> None:
        """Take in one batch, which took ``seconds``; waits until its figures have arrived."""
        config = self._config
        stages = tuple(
            StageRow(stage.busy_fraction, stage.num_versions, stage.peak_bytes)
            for stage in result.stage_metrics() or ()
        )
        row = BatchRow(
            batch=result.batch,
            loss=float(result.loss),
            lr=lr_at(result.batch, config.optimizer, config.training.num_batches),
            tokens_per_second=self._tokens(1) / seconds,
            samples=(result.batch + 1) * config.training.global_batch_size,
            stages=stages,
        )
        self._num_batches = result.batch + 1
        self._loss = row.loss
        self._averages.add(stages)
        self._metrics.write(row)
        self._progress.update(row)

    def finish(self, outcome: Outcome) -> None:
        """Write the results, the summary last, and say what came of the run."""
        with replacing(self._folder / WEIGHTS) as path:
            save_file(outcome.weights, path)
        write_json(self._folder / TIMELINE, chrome_trace(outcome.timeline), indent=None)
        summary = self._summary(outcome)
        write_json(self._folder / SUMMARY, asdict(summary))
        self._progress.close()
        self._progress.note(describe(summary, self._folder))

    def _tokens(self, num_batches: int) -> int:
        training, model = self._config.training, self._config.model
        return num_batches * training.global_batch_size * model.sequence_length

    def _summary(self, outcome: Outcome) -> Summary:
        training = self._config.training
        tokens = self._tokens(self._num_batches)
        return Summary(
            schedule=self._config.parallel.schedule,
            num_batches=self._num_batches,
            samples=self._num_batches * training.global_batch_size,
            tokens=tokens,
            is_stopped_early=self._num_batches < training.num_batches,
            validation_loss_start=finite(outcome.loss_start),
            validation_loss_end=finite(outcome.loss_end),
            train_loss_end=finite(self._loss),
            tokens_per_second=tokens / outcome.seconds,
            train_seconds=outcome.seconds,
            stages=self._averages.summaries(self._split),
            prompt=PROMPT,
            sample=self._sample(outcome.weights),
        )

    def _sample(self, weights: dict[str, Tensor]) -> str:
        """What the model goes on with after `PROMPT`; nothing if its training has diverged."""
        size = self._config.model.gpt()
        with torch.device("meta"):
            model = gpt(size)
        model.load_state_dict(weights, assign=True)
        try:
            text = generate(
                model, PROMPT.encode(), _SAMPLE_TOKENS, sequence_length=size.sequence_length
            )
        except ValueError as error:
            self._progress.note(f"no sample: {error}")
            return ""
        return PROMPT + readable(text)


def readable(text: bytes) -> str:
    """Text that a model wrote, fit for a terminal: what is not UTF-8 or not printable is marked."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text.decode("utf-8", errors="replace")
    )


def describe(summary: Summary, folder: Path) -> str:
    """What a run has come to, for a person."""
    lines = [
        f"{summary.num_batches:,} batches, {summary.tokens:,} tokens in "
        f"{duration(summary.train_seconds)}: {summary.tokens_per_second:,.0f} tokens/s",
    ]
    if summary.validation_loss_start is not None and summary.validation_loss_end is not None:
        lines.append(
            f"validation loss {summary.validation_loss_start:.4f} at the start, "
            f"{summary.validation_loss_end:.4f} at the end, in nats a byte"
        )
    lines += [
        f"stage {index}: {stage.num_layers} layers, busy {stage.busy_fraction:.1%}, "
        f"{stage.num_versions} weight versions held, peak {stage.peak_bytes / 2**20:,.0f} MiB"
        for index, stage in enumerate(summary.stages)
    ]
    lines += [
        f"a sample after {summary.prompt!r}:",
        *(f"  | {line}" for line in summary.sample.splitlines()),
        f"timeline  {folder / TIMELINE} (open it in ui.perfetto.dev)",
        f"weights   {folder / WEIGHTS} (twobw sample {folder} --prompt {summary.prompt!r})",
    ]
    return "\n".join(lines)


@contextmanager
def _warnings_noted(progress: Progress) -> Iterator[None]:
    """Show what this package warns of; what others warn of goes to the log, as ever."""
    with warnings.catch_warnings():
        log = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if filename.startswith(_PACKAGE):
                progress.note(f"warning: {message}")
            else:
                log(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
