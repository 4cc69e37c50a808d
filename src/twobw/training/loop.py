"""The training loop of one rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from torch import Tensor, distributed

from twobw import Pipeline
from twobw.config import Config
from twobw.models.gpt import gpt_layers, loss_fn
from twobw.runtime.results import StepResult
from twobw.training.data import TextData
from twobw.training.optimizer import make_lr_scheduler, make_optimizer
from twobw.training.report import Outcome, RunReport, open_report
from twobw.training.stopping import stop_on

# A result is read this many batches later, when that no longer waits for the last stage.
_LOG_LAG = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A batch that has begun on this rank, and the seconds since the one before (or the start)."""

    result: StepResult
    seconds: float


def train(config: Config, folder: Path, stop_signals: Sequence[Signals]) -> None:
    """Train as the config says and leave the results in ``folder``; every rank calls this.

    The process group must be there. Rank 0 shows how the run goes on standard output, and writes
    the results. The first of ``stop_signals`` makes the next batch the last one.
    """
    data = TextData(
        config.data.paths,
        sequence_length=config.model.sequence_length,
        validation_fraction=config.data.validation_fraction,
        seed=config.training.seed,
    )
    is_reporter = distributed.get_rank() == 0
    with (
        open_report(config, folder) if is_reporter else nullcontext() as report,
        make_pipeline(config) as pipeline,
    ):
        stop_on(stop_signals, pipeline.request_stop)
        _run(config, data, pipeline, report)


def make_pipeline(config: Config) -> Pipeline:
    """The pipeline that the config describes, over the process group's ranks."""
    return Pipeline(
        gpt_layers(config.model.gpt()),
        loss_fn,
        make_optimizer(config.optimizer),
        schedule=config.parallel.schedule,
        num_microbatches=config.parallel.num_microbatches,
        split=list(config.parallel.split) or None,
        pp=config.parallel.pp,
        dp=config.parallel.dp,
        seed=config.training.seed,
        lr_scheduler=make_lr_scheduler(config.optimizer, config.training.num_batches),
        extra_in_flight=config.parallel.extra_in_flight,
        timeout=config.training.timeout_s,
    )


def _run(config: Config, data: TextData, pipeline: Pipeline, report: RunReport | None) -> None:
    """All that every rank does in the same order; ``report`` is rank 0's."""
    loss_start = validation_loss(config, data, pipeline)
    if report:
        report.begin(data, pipeline.split, loss_start)
    start = time.monotonic()
    pending: deque[Step] = deque()
    for step in _steps(config, data, pipeline):
        pending.append(step)
        if len(pending) > _LOG_LAG:
            oldest = pending.popleft()
            if report:
                report.add(oldest.result, oldest.seconds)
    pipeline.drain()
    seconds = time.monotonic() - start
    if report:
        for step in pending:
            report.add(step.result, step.seconds)
    loss_end = validation_loss(config, data, pipeline)
    weights, timeline = pipeline.full_state_dict(), pipeline.timeline()
    if report and weights is not None and timeline is not None:
        report.finish(Outcome(seconds, loss_start, loss_end, weights, timeline))


def _steps(config: Config, data: TextData, pipeline: Pipeline) -> Iterator[Step]:
    """Train batch after batch, up to the last one or the one that a stop request made the last."""
    before = time.monotonic()
    for batch in range(config.training.num_batches):
        size = config.training.global_batch_size
        inputs, targets = _needed(pipeline, data.batch(batch * size, size))
        result = pipeline.train_step(inputs, targets)
        now = time.monotonic()
        yield Step(result, now - before)
        before = now
        if result.is_last:
            return


def validation_loss(config: Config, data: TextData, pipeline: Pipeline) -> float | None:
    """Mean loss over ``evaluation_batches`` batches of the validation text; None without any."""
    losses = []
    num_batches, size = config.training.evaluation_batches, config.training.global_batch_size
    for batch in data.validation_batches(num_batches, size):
        num_microbatches = min(config.parallel.num_microbatches, len(batch[0]))
        inputs, targets = _needed(pipeline, batch)
        losses.append(pipeline.evaluate(inputs, targets, num_microbatches=num_microbatches))
    return sum(losses) / len(losses) if losses else None


def _needed(
    pipeline: Pipeline, batch: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """The inputs on the first stage and the targets on the last."""
    inputs, targets = batch
    return (
        inputs if pipeline.is_first_stage else None,
        targets if pipeline.is_last_stage else None,
    )
