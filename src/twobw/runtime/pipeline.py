"""`Pipeline`: the public face of the runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor

from twobw.core.checker import check, format_violations
from twobw.core.generators import generate
from twobw.core.timeline import Timeline
from twobw.runtime.batch import count_samples
from twobw.runtime.distributed import connect
from twobw.runtime.executor import LossFunction
from twobw.runtime.layers import Layer, build_layers, check_no_ties, choose_split
from twobw.runtime.messages import Value
from twobw.runtime.optimization import OptimizerFactory, SchedulerFactory
from twobw.runtime.randomness import LayerRunner
from twobw.runtime.rank import Rank, ScheduleChoice
from twobw.runtime.results import StepResult
from twobw.runtime.transport import ThreadHub, ThreadTransport, TransportError

Result = TypeVar("Result")

_CHECKED_BATCHES = 4


class Pipeline:
    """Trains a row of layers over several stages.

    Under an initialised process group its ranks are the stages; every rank makes the same
    `Pipeline` and the same calls. Without one the stages are threads of this process: draw your
    data from a generator of your own there, since dropout uses the default one.

    Args:
        layers: modules, or callables without arguments that build one, called only on the rank
            that needs it, with the random generator set from (seed, layer). As in
            ``nn.Sequential``, a layer takes what the one before gives: a tensor or a tuple of
            tensors, the batch first.
        loss_fn: ``loss_fn(output, target)`` -> mean over the microbatch, or ``(sum, weight)``.
        optimizer: from this rank's ``(name, parameter)`` pairs to one torch.optim optimizer or a
            list; not called where nothing trains.
        schedule: ``"2bw"``, ``"1f1b"``, ``"gpipe"``, ``"weight-stashing"`` or ``"no-pipeline"``.
        num_microbatches: of a batch.
        split: layers of each stage; ``None`` balances by number of parameters.
        pp: number of stages; ``None``: the size of the process group.
        dp: replicas of each stage.
        seed: of built layers and of dropout.
        lr_scheduler: from an optimizer to its torch.optim.lr_scheduler, stepped once a batch.
        extra_in_flight: for ``"2bw"``: how far stages run ahead to hide slow links.
        timeout: seconds that one wait for another stage may last.

    Raises:
        ValueError: a setting that does not fit, or a schedule that the checker refuses; before
            anything runs.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss_fn: LossFunction,
        optimizer: OptimizerFactory,
        schedule: str = "2bw",
        num_microbatches: int = 4,
        split: Sequence[int] | None = None,
        pp: int | None = None,
        dp: int = 1,
        *,
        seed: int = 0,
        lr_scheduler: SchedulerFactory | None = None,
        extra_in_flight: int = 0,
        timeout: float = 600.0,
    ) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.num_stages = _num_stages(pp, dp, dist.get_world_size() if is_distributed else None)
        options = {"extra_in_flight": extra_in_flight} if extra_in_flight else {}
        self._schedule = ScheduleChoice(schedule, num_microbatches, options)
        _check_schedule(self._schedule, self.num_stages)
        self.split = choose_split(layers, split, self.num_stages)
        check_no_ties(layers, self.split)
        self.is_distributed = is_distributed
        stages = [dist.get_rank()] if is_distributed else range(self.num_stages)
        hub = ThreadHub(self.num_stages)
        lock = None if is_distributed or self.num_stages == 1 else Lock()
        self._ranks: list[Rank] = []
        for stage in stages:
            first, count = sum(self.split[:stage]), self.split[stage]
            self._ranks.append(
                Rank(
                    stage,
                    self.num_stages,
                    build_layers(layers[first : first + count], first, seed),
                    first,
                    loss_function=loss_fn,
                    make_optimizer=optimizer,
                    make_scheduler=lr_scheduler,
                    schedule=self._schedule,
                    transport=(
                        connect(range(self.num_stages), stage, timeout)
                        if is_distributed
                        else ThreadTransport(hub, stage, timeout)
                    ),
                    runner=LayerRunner(seed, lock),
                )
            )
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"stage-{stage}")
            for stage in (() if is_distributed else stages)
        ]
        self._running: list[Future[Any]] = []
        self._failure: BaseException | None = None

    @property
    def rank(self) -> int:
        """This process's rank; 0 where the stages are threads."""
        return self.stage

    @property
    def stage(self) -> int:
        """This process's stage; 0 where the stages are threads."""
        return self._ranks[0].index

    @property
    def is_first_stage(self) -> bool:
        """Whether this process has the first stage, which needs the inputs."""
        return self._ranks[0].index == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process has the last stage, which needs the targets."""
        return self._ranks[-1].index == self.num_stages - 1

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return self._schedule.name

    def train_step(self, inputs: Value | None, targets: Value | None) -> StepResult:
        """Train on one batch: run this rank's ops up to its last forward of the batch.

        What is left of the batch runs with the next call, or with `drain`. The tensors must not
        be changed before that.

        Args:
            inputs: the whole batch, its samples along the first dimension; ``None`` will do
                where this process does not have the first stage.
            targets: likewise for the last stage.

        Raises:
            ValueError: fewer samples than microbatches, or sizes that differ.
            TransportError: another stage has failed or does not answer.
        """
        self._check_batch(inputs, targets, self._schedule.num_microbatches)
        return self._call(lambda rank: rank.train_step(inputs, targets), wait_for_all=False)

    def request_stop(self) -> None:
        """Make the next batch begun the last one: on every rank its result says ``is_last``.
        Only the first stage's word counts. May be called from a signal handler."""
        self._ranks[0].request_stop()

    def drain(self) -> None:
        """Finish what is in flight. Changes no result; every rank calls it at the same batch."""
        self._call(lambda rank: rank.drain())

    def evaluate(
        self, inputs: Value | None, targets: Value | None, num_microbatches: int | None = None
    ) -> float:
        """The mean loss on the newest weights, in eval mode and without gradients.

        Drains first. Every rank calls it at the same batch and gets the loss.

        Args:
            inputs: as for `train_step`.
            targets: as for `train_step`.
            num_microbatches: ``None``: as in training.
        """
        count = num_microbatches or self._schedule.num_microbatches
        self._check_batch(inputs, targets, count)
        return self._call(lambda rank: rank.evaluate(inputs, targets, count))

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The newest weights and the buffers, under the names of ``nn.Sequential(*layers)``, on
        the CPU of rank 0; ``None`` elsewhere. Drains first; every rank calls it."""
        return self._call(lambda rank: rank.state_dict())

    def timeline(self) -> Timeline | None:
        """What every rank did in its last batches, on rank 0; ``None`` elsewhere. Drains first;
        every rank calls it."""
        return self._call(lambda rank: rank.timeline())

    def close(self) -> None:
        """End the threads, if the stages are threads."""
        for thread in self._threads:
            thread.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_batch(
        self, inputs: Value | None, targets: Value | None, num_microbatches: int
    ) -> None:
        """Refuse a batch before any stage begins it."""
        sizes: dict[str, int] = {}
        for value, what, needed in (
            (inputs, "inputs", self.is_first_stage),
            (targets, "targets", self.is_last_stage),
        ):
            if needed and value is None:
                raise ValueError(f"{what} is None, but this process has the stage that needs them")
            if value is not None:
                sizes[what] = count_samples(value, what, num_microbatches)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"inputs and targets have different numbers of samples: {sizes}")

    def _call(self, function: Callable[[Rank], Result], *, wait_for_all: bool = True) -> Result:
        """Call ``function`` for this process's stages; the result is that of the first.

        Stages that are threads need not have ended when the first has, unless asked.
        """
        if not self._threads:
            return function(self._ranks[0])
        if self._failure is not None:
            raise RuntimeError(
                f"this pipeline has failed ({self._failure}); make a new one"
            ) from self._failure
        calls = [
            thread.submit(_guarded, function, rank)
            for thread, rank in zip(self._threads, self._ranks, strict=True)
        ]
        self._running += calls
        wait(self._running if wait_for_all else calls[:1])
        if any(call.done() and call.exception() for call in self._running):
            self._failure = self._first_failure()
            raise self._failure
        self._running = [call for call in self._running if not call.done()]
        return calls[0].result()

    def _first_failure(self) -> BaseException:
        """The error that started it: the other stages then fail for want of that one."""
        wait(self._running)
        errors = [error for call in self._running if (error := call.exception()) is not None]
        return next((e for e in errors if not isinstance(e, TransportError)), errors[0])


def _guarded(function: Callable[[Rank], Result], rank: Rank) -> Result:
    """Call ``function`` on a stage's thread; let the other stages know if it fails."""
    try:
        return function(rank)
    except BaseException as error:
        rank.fail(error)
        raise


def _num_stages(pp: int | None, dp: int, world_size: int | None) -> int:
    if dp != 1:
        raise ValueError(f"dp = {dp}: only dp = 1 is supported")
    if world_size is None:
        if pp is None:
            raise ValueError("pp is None, but there is no process group to take it from; set pp")
        if pp < 1:
            raise ValueError(f"pp = {pp}; it must be at least 1")
        return pp
    if pp not in (None, world_size):
        raise ValueError(
            f"pp = {pp} does not fit the process group of {world_size} ranks: pp * dp must be "
            f"{world_size}"
        )
    return world_size


def _check_schedule(choice: ScheduleChoice, num_stages: int) -> None:
    """Refuse a schedule that the checker refuses; warn of one that wastes."""
    p, m = num_stages, choice.num_microbatches
    schedule = generate(choice.name, p, m, _CHECKED_BATCHES, **choice.options)
    violations = check(schedule)
    if violations:
        raise ValueError(
            f"schedule {choice.name!r} with {p} stages and {m} microbatches is illegal:\n"
            f"{format_violations(schedule, violations)}"
        )
    if choice.name == "2bw" and p == 1:
        warnings.warn(
            "2bw with one stage keeps two weight versions and a gradient one batch old, and gains "
            "nothing; use schedule='1f1b'",
            stacklevel=3,
        )
    elif choice.name == "2bw" and m < p - 1:
        warnings.warn(
            f"2bw with {m} microbatches on {p} stages runs at {m}/{p - 1} of full speed; "
            f"use num_microbatches >= {p - 1}, better {p}",
            stacklevel=3,
        )
