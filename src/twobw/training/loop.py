"""The training loop of one rank."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals

from torch import Tensor, distributed

from twobw import Keep, Pipeline
from twobw.config import Config
from twobw.models.whole import model_layers, model_loss
from twobw.runtime.randomness import build_layer
from twobw.runtime.results import StepResult
from twobw.training.data import Samples
from twobw.training.device import own_device
from twobw.training.evaluation import Evaluation
from twobw.training.initial_weights import start_from
from twobw.training.metrics import finite
from twobw.training.optimizer import make_lr_scheduler, make_optimizer
from twobw.training.placement import Placement
from twobw.training.report import Outcome, RunReport, open_report
from twobw.training.resuming import OpenRun, Start
from twobw.training.run_folder import CHECKPOINTS
from twobw.training.samples import make_samples
from twobw.training.stopping import stop_on

# A result is read this many batches later, when that no longer waits for another rank.
_LOG_LAG = 2


def train(config: Config, run: OpenRun, stop_signals: Sequence[Signals], command: str) -> None:
    """Train as the config says and leave the results in the run's folder; every rank calls this.

    The process group must be there. Rank 0 shows how the run goes on standard output, and writes
    the results. The first of ``stop_signals`` makes the next batch the last one; the word of
    rank 0 counts. ``command`` is how the user calls this program, for what is printed.
    """
    data = make_samples(config)
    is_reporter = distributed.get_rank() == 0
    with (
        open_report(config, run.folder, command) if is_reporter else nullcontext() as report,
        make_pipeline(config) as pipeline,
    ):
        start = _start(pipeline, run)
        stop_on(stop_signals, pipeline.request_stop)
        if report:
            report.begin(data, pipeline.split, start)
        _Loop(config, data, pipeline, report, run.folder / CHECKPOINTS, start).run()


def _start(pipeline: Pipeline, run: OpenRun) -> Start:
    """Where the run begins: anew, or after its newest whole checkpoint, which is loaded."""
    if not run.goes_on:
        return Start()
    manifest = pipeline.load(run.folder / CHECKPOINTS)
    best_loss = manifest.notes["best_loss"]
    return Start(
        manifest.progress.batch,
        manifest.notes["samples"],
        math.inf if best_loss is None else best_loss,
    )


def make_pipeline(config: Config) -> Pipeline:
    """The pipeline that the config describes, over the process group's ranks."""
    parallel, training = config.parallel, config.training
    layers = model_layers(config.model.size(), partial(build_layer, training.seed))
    return Pipeline(
        start_from(layers, config.model.init_from) if config.model.init_from else layers,
        model_loss(config.model.size()),
        make_optimizer(config.optimizer),
        schedule=parallel.schedule,
        num_microbatches=parallel.num_microbatches,
        split=list(parallel.split) or None,
        pp=parallel.pp,
        dp=parallel.dp,
        placement=parallel.placement,  # type: ignore[arg-type]
        seed=training.seed,
        lr_scheduler=make_lr_scheduler(config.optimizer, training.num_batches),
        extra_in_flight=parallel.extra_in_flight,
        update_lag=parallel.update_lag if isinstance(parallel.update_lag, int) else None,
        lookahead=parallel.lookahead,
        flush_batches=parallel.flush_batches,
        precision=training.precision,
        recompute=training.recompute,
        max_grad_norm=training.max_grad_norm or None,
        shard_optimizer=parallel.shard_optimizer,
        overlap_reduce=parallel.overlap_reduce,
        skip_non_finite=training.on_divergence == "skip",
        timeout=training.timeout_s,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch that has begun on this rank, and the seconds since the one before (or the start)."""

    result: StepResult
    seconds: float


class _Stopwatch:
    """Counts the seconds of training.

    Attributes:
        total: of all laps.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._since = time.monotonic()

    def lap(self) -> float:
        """The seconds since the last lap or skip."""
        before = self._since
        self.skip()
        self.total += self._since - before
        return self._since - before

    def skip(self) -> None:
        """Leave out what passed since the last lap or skip."""
        self._since = time.monotonic()


class _Loop:
    """All that every rank does in the same order; ``report`` is rank 0's."""

    def __init__(
        self,
        config: Config,
        data: Samples,
        pipeline: Pipeline,
        report: RunReport | None,
        checkpoints: Path,
        start: Start,
    ) -> None:
        self._config = config
        self._data = data
        self._pipeline = pipeline
        self._report = report
        self._placement = Placement(
            pipeline.replica,
            config.parallel.dp,
            pipeline.is_first_stage,
            pipeline.is_last_stage,
            own_device(config.training.device),
        )
        self._evaluation = Evaluation(config, data, pipeline, self._placement)
        self._evaluation.best_loss = start.best_loss
        self._checkpoints = checkpoints
        self._start = start
        self._score: float | None = None
        self._checks_replicas = config.parallel.dp > 1 and config.parallel.check_replicas_every > 0
        self._watch = _Stopwatch()
        self._update_lag = pipeline.update_lag
        self._num_batches = start.batch
        self._pending: deque[_Step] = deque()

    def run(self) -> None:
        """Evaluate, train batch after batch up to the last one or the one that a stop request
        made the last, evaluate, and leave the results."""
        if self._num_batches == 0:
            self._evaluate()
        self._watch.skip()
        while self._num_batches < self._config.training.num_batches:
            result = self._train_batch()
            if result.is_last:
                break
            if self._num_batches < self._config.training.num_batches:
                self._pause_if_due()
        self._drain()
        if self._checks_replicas:
            self._pipeline.check_replicas()
        self._evaluate()
        training = self._config.training
        if self._config.checkpoint.every or self._num_batches < training.num_batches:
            self._save()
        weights, timeline = self._pipeline.full_state_dict(), self._pipeline.timeline()
        non_finite = self._pipeline.first_non_finite()
        if self._report and weights is not None and timeline is not None:
            self._report.finish(Outcome(self._watch.total, weights, timeline, non_finite))

    def _train_batch(self) -> StepResult:
        self._score = None
        result = self._pipeline.train_step(*self._batch(self._num_batches))
        if self._report and self._update_lag != (lag := self._pipeline.update_lag):
            self._update_lag = lag
            if lag:
                self._report.switched(self._num_batches, lag)
        self._num_batches += 1
        self._pending.append(_Step(result, self._watch.lap()))
        self._log(_LOG_LAG)
        return result

    def _batch(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """This rank's part of a batch; nothing on a stage that needs none of it."""
        if not (self._placement.needs_inputs or self._placement.needs_targets):
            return None, None
        size = self._config.training.global_batch_size
        first, count = self._placement.part(size)
        position = self._start.position(number, size)
        return self._placement.needed(self._data.batch(position + first, count))

    def _pause_if_due(self) -> None:
        """Between two batches: compare the replicas, evaluate, or save a checkpoint. The first two
        are no time of training, but the drain before is."""
        parallel, training = self._config.parallel, self._config.training
        is_check = self._checks_replicas and self._num_batches % parallel.check_replicas_every == 0
        every = training.evaluate_every
        is_evaluation = every > 0 and self._num_batches % every == 0
        every = self._config.checkpoint.every
        is_checkpoint = every > 0 and self._num_batches % every == 0
        if not (is_check or is_evaluation or is_checkpoint):
            return
        self._drain()
        if is_check:
            self._pipeline.check_replicas()
        if is_evaluation:
            self._evaluate()
        self._watch.skip()
        if is_checkpoint:
            self._save()

    def _save(self) -> None:
        """Save a checkpoint; all batches have ended and are reported. With an evaluation of these
        very weights, it has a score."""
        keep, size = self._config.checkpoint, self._config.training.global_batch_size
        notes = {
            "samples": self._start.position(self._num_batches, size),
            "best_loss": finite(self._evaluation.best_loss),
            "data": self._data.description,
            "config": self._config.model_dump(),
        }
        self._pipeline.save(
            self._checkpoints,
            notes,
            score=finite(self._score),
            keep=Keep(keep.keep_last, keep.keep_every, keep.keep_best),
        )

    def _drain(self) -> None:
        self._pipeline.drain()
        self._watch.lap()
        self._log(0)

    def _log(self, lag: int) -> None:
        """Report all but the last ``lag`` batches."""
        while len(self._pending) > lag:
            step = self._pending.popleft()
            if self._report:
                self._report.add(step.result, step.seconds)
                if self._report.failure:
                    self._pipeline.request_stop()

    def _evaluate(self) -> None:
        """Evaluate; where that is done on the way, keep the weights that are the best so far."""
        loss, accuracy = self._evaluation.loss(), self._evaluation.accuracy()
        self._score = loss
        if self._report and loss is not None:
            self._report.validated(self._num_batches, loss, accuracy)
        if not (self._config.training.evaluate_every and self._num_batches):
            return
        if self._evaluation.is_best(loss):
            weights = self._pipeline.full_state_dict()
            if self._report and weights is not None:
                self._report.keep_best(weights)
