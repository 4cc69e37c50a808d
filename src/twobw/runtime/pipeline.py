"""`Pipeline`: the public face of the runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twobw.core.rank_grid import Placement, RankGrid
from twobw.core.timeline import Timeline
from twobw.runtime.batch import count_samples, join, split, split_sizes
from twobw.runtime.checkpoint.manifest import Manifest
from twobw.runtime.checkpoint.writing import Keep
from twobw.runtime.executor import LossFunction
from twobw.runtime.finiteness import NonFinite
from twobw.runtime.layers import (
    Layer,
    build_layers,
    choose_split,
    copies_where_shared,
    find_shared_buffers,
    find_ties,
)
from twobw.runtime.mesh import distributed_mesh, thread_meshes
from twobw.runtime.messages import Value
from twobw.runtime.optimization import OptimizerFactory, SchedulerFactory
from twobw.runtime.randomness import LayerRunner
from twobw.runtime.rank import Rank, Settings
from twobw.runtime.results import StepResult
from twobw.runtime.saving import Saving
from twobw.runtime.schedules import ScheduleChoice, check_schedule
from twobw.runtime.transport import TransportError

Result = TypeVar("Result")


class Pipeline:
    """Trains a row of layers over several stages.

    Under an initialised process group its ranks are the stages; every rank makes the same
    `Pipeline` and the same calls. Without one the stages are threads of this process: draw your
    data from a generator of your own there, since dropout uses the default one.

    Args:
        layers: modules, or callables without arguments that build one, called only on the rank
            that needs it, with the random generator set from (seed, layer); and, without
            ``split``, once on the meta device, where it takes no memory, to count parameters. As
            in ``nn.Sequential``, a layer takes what the one before gives: a tensor or a tuple of
            tensors, the batch first.
        loss_fn: ``loss_fn(output, target)`` -> mean over the microbatch, or ``(sum, weight)``.
        optimizer: from this rank's ``(name, parameter)`` pairs to one torch.optim optimizer or a
            list; not called where nothing trains.
        schedule: ``"2bw"``, ``"2bw-fresh"``, ``"paci"``, ``"1f1b"``, ``"gpipe"``,
            ``"weight-stashing"`` or ``"no-pipeline"``.
        num_microbatches: of a batch.
        split: layers of each stage; ``None`` balances by number of parameters.
        pp: number of stages; ``None``: the size of the process group.
        dp: replicas of each stage. Each process passes its replica's part of a batch, as with
            DistributedDataParallel; where the stages are threads, the whole batch.
        placement: what neighbouring ranks are, which launchers put on one machine: the
            ``"replicas"`` of a stage, or the stages of a pipeline (``"pipelines"``).
        seed: of built layers and of dropout.
        lr_scheduler: from an optimizer to its torch.optim.lr_scheduler, stepped once a batch.
        extra_in_flight: for ``"2bw"`` and ``"2bw-fresh"``: how far stages run ahead to hide slow
            links.
        update_lag: for ``"2bw-fresh"``: microbatch slots that what must be reduced has to arrive;
            as many more microbatches run on the older version. ``None``: 0 where nothing is to be
            reduced or there is one stage, else as few as hide the reductions, measured over the
            first batches, which are then flushed (`flush_batches`, or 8); a run that is to be
            repeated to the bit states it.
        lookahead: ``a``: gradients that are one version old are taken at the extrapolated weights
            ``W(v) + a (W(v) - W(v-1))``, nearer to where they will be applied (SpecTrain, Chen et
            al., 2018). In fp32 for one more copy of the weights.
        flush_batches: the first so many batches run by ``"1f1b"``; the schedule's version rule
            counts from there.
        precision: ``"fp32"`` leaves dtypes as they are; ``"bf16"`` and ``"fp16"`` keep fp32 main
            weights and gradients, and compute on a 16-bit copy (fp16 with dynamic loss scaling).
        recompute: ``"none"``, or what is run again for the backward instead of being kept: each
            ``"layer"`` from its inputs, the whole ``"stage"`` from its inputs, or only modules
            that are ``"attention"`` (``nn.MultiheadAttention``, or a true ``is_attention``).
        max_grad_norm: clip the global norm of the gradient, over all stages, to this.
        shard_optimizer: spread optimizer state over the replicas (ZeRO stage 1).
        overlap_reduce: hide what must be reduced behind the next batch, for a second gradient
            buffer; ``False`` waits for it after each batch's last backward.
        skip_non_finite: leave out, on every rank, an update whose gradient is not finite anywhere,
            as fp16 always does. Over several stages updates then wait for the other ranks, as with
            ``max_grad_norm``.
        timeout: seconds that one wait for another rank may last.

    Raises:
        ValueError: a setting that does not fit, or a schedule that the checker refuses; before
            anything runs.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss_fn: LossFunction,
        optimizer: OptimizerFactory,
        schedule: str = "2bw-fresh",
        num_microbatches: int = 4,
        split: Sequence[int] | None = None,
        pp: int | None = None,
        dp: int = 1,
        *,
        placement: Placement = "replicas",
        seed: int = 0,
        lr_scheduler: SchedulerFactory | None = None,
        extra_in_flight: int = 0,
        update_lag: int | None = None,
        lookahead: float = 0.0,
        flush_batches: int = 0,
        precision: str = "fp32",
        recompute: str = "none",
        max_grad_norm: float | None = None,
        shard_optimizer: bool = False,
        overlap_reduce: bool = True,
        skip_non_finite: bool = False,
        timeout: float = 600.0,
    ) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.num_stages = _num_stages(pp, dp, dist.get_world_size() if is_distributed else None)
        self._precision = precision
        self._recompute = recompute
        self._skips = skip_non_finite or precision == "fp16"
        self._lookahead = _at_least_0("lookahead", lookahead)
        self._schedule = self._checked(schedule, num_microbatches, extra_in_flight, update_lag)
        self.split = choose_split(layers, split, self.num_stages)
        ties = find_ties(layers, self.split)
        shared_buffers = find_shared_buffers(layers, self.split)
        tie_sets = list(dict.fromkeys(frozenset(tie.name_on) for tie in ties))
        grid = RankGrid(self.num_stages, dp, placement)
        if is_distributed:
            device = torch.device("cpu")
            if dist.get_backend() == "nccl":
                device = torch.device("cuda", torch.cuda.current_device())
            meshes = [distributed_mesh(grid, tie_sets, device, timeout)]
        else:
            meshes = thread_meshes(grid, tie_sets, timeout)
        settings = Settings(
            loss_fn,
            optimizer,
            lr_scheduler,
            precision,
            recompute,
            max_grad_norm,
            shard_optimizer,
            overlap_reduce,
            lookahead,
            int(_at_least_0("flush_batches", flush_batches)),
            skip_non_finite,
            reduces=dp > 1
            or bool(ties)
            or (self.num_stages > 1 and (max_grad_norm is not None or self._skips)),
        )
        lock = Lock() if len(meshes) > 1 else None
        firsts = [sum(self.split[: mesh.stage]) for mesh in meshes]
        taken: set[nn.Module | nn.Parameter] = set()
        own_layers = [
            copies_where_shared(layers[first : first + self.split[mesh.stage]], taken)
            for mesh, first in zip(meshes, firsts, strict=True)
        ]
        self._ranks = [
            Rank(
                mesh,
                build_layers(own, first, seed),
                first,
                ties,
                shared_buffers,
                settings=settings,
                schedule=self._schedule,
                runner=LayerRunner(seed, lock),
            )
            for mesh, own, first in zip(meshes, own_layers, firsts, strict=True)
        ]
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"stage-{mesh.stage}-{mesh.replica}")
            for mesh in (() if is_distributed else meshes)
        ]
        self._timeout = timeout
        self._watchdog = meshes[0].activity.watchdog
        if self._watchdog is not None and self.num_stages * dp > 1:
            self._watchdog.start(self)
        self._running: list[Future[Any]] = []
        self._failure: BaseException | None = None
        self._saving = Saving(self._ranks, self._call, self.split, timeout)

    @property
    def rank(self) -> int:
        """This process's rank; 0 where the stages are threads."""
        return self._ranks[0].mesh.rank

    @property
    def stage(self) -> int:
        """This process's stage; 0 where the stages are threads."""
        return self._ranks[0].mesh.stage

    @property
    def replica(self) -> int:
        """This process's replica; 0 where the stages are threads."""
        return self._ranks[0].mesh.replica

    @property
    def is_first_stage(self) -> bool:
        """Whether this process has the first stage, which needs the inputs."""
        return self._ranks[0].mesh.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process has the last stage, which needs the targets."""
        return self._ranks[-1].mesh.stage == self.num_stages - 1

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return self._schedule.name

    @property
    def update_lag(self) -> int | None:
        """The update lag in force, given or measured; ``None`` while the schedule in force has
        none."""
        return self._ranks[0].update_lag

    def train_step(self, inputs: Value | None, targets: Value | None) -> StepResult:
        """Train on one batch: run this rank's ops up to its last forward of the batch.

        What is left of the batch runs with the next call, or with `drain`. The tensors must not
        be changed before that.

        Args:
            inputs: the batch, its samples along the first dimension; ``None`` will do where this
                process does not have the first stage. With replicas, this one's part.
            targets: likewise for the last stage.

        Raises:
            ValueError: fewer samples than microbatches, or sizes that differ.
            TransportError: another stage has failed or does not answer.
        """
        x, y = self._parts(inputs, targets, self._schedule.num_microbatches)
        return self._call(
            lambda rank: rank.train_step(x[rank.mesh.replica], y[rank.mesh.replica]),
            wait_for_all=False,
        )[0]

    def request_stop(self) -> None:
        """Make the next batch begun the last one: on every rank its result says ``is_last``.
        Only the word of rank 0 counts. May be called from a signal handler."""
        self._ranks[0].request_stop()

    def set_schedule(
        self,
        schedule: str,
        num_microbatches: int | None = None,
        *,
        extra_in_flight: int = 0,
        update_lag: int | None = None,
    ) -> None:
        """Go on with another schedule, whose version rule counts from the next batch.

        Drains first; every rank calls it at the same batch. `timeline` starts anew.

        Args:
            schedule: as for `Pipeline`.
            num_microbatches: ``None``: as before.
            extra_in_flight: as for `Pipeline`.
            update_lag: as for `Pipeline`; measured over the batches that have run.

        Raises:
            ValueError: as for `Pipeline`; the old schedule then stays.
        """
        count = num_microbatches or self._schedule.num_microbatches
        choice = self._checked(schedule, count, extra_in_flight, update_lag)
        self._call(lambda rank: rank.set_schedule(choice))
        self._schedule = choice

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
        x, y = self._parts(inputs, targets, count)
        return self._call(
            lambda rank: rank.evaluate(x[rank.mesh.replica], y[rank.mesh.replica], count)
        )[0]

    def forward(self, inputs: Value | None, num_microbatches: int | None = None) -> Value | None:
        """The last layer's outputs for a batch, where this process has the last stage; ``None``
        elsewhere. As `evaluate`: newest weights, eval mode, no gradients, drains first."""
        count = num_microbatches or self._schedule.num_microbatches
        x, _ = self._parts(inputs, None, count, needs_targets=False)
        outputs = self._call(lambda rank: rank.forward(x[rank.mesh.replica], count))
        given = [output for replica in outputs for output in replica]
        return join(given) if given else None

    def save(
        self,
        folder: str | Path,
        notes: Mapping[str, Any] | None = None,
        *,
        score: float | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Keep a checkpoint of all that the run follows from, ``folder/step-00000120``.

        Drains first and copies; a thread then writes, while training goes on. What keeps it from
        being written is warned of. Every rank calls it at the same batch; the ranks share the
        file system.

        Args:
            folder: where checkpoints are.
            notes: whatever else is to be kept, as far as JSON can: the position in the data, say.
                Those of rank 0 count.
            score: the lower the better, for ``keep``.
            keep: which checkpoints stay beside it; ``None``: all.

        Raises:
            CheckpointError: an optimizer has state that is neither a tensor nor fit for JSON, or
                the notes are not.
        """
        self._saving.save(Path(folder), notes or {}, score, keep or Keep())

    def wait_until_saved(self) -> None:
        """Wait until this process has written what `save` has begun; rank 0 until all have."""
        self._saving.wait()

    def load(self, folder: str | Path) -> Manifest:
        """Go on from the newest whole checkpoint in ``folder``, or from ``folder`` if it is one.

        It may be one of any number of stages and replicas, of any split and schedule; what goes on
        is the model, the optimizer, the learning rates, the loss scale and the number of the batch.
        An older weight version that the checkpoint does not have, since its schedule kept none or
        makes them in another rhythm, is replaced by the newest. Under the layout that it was
        saved from, the run goes on as it would have, to the bit.

        Drains first; every rank calls it. Damaged checkpoints are warned of and passed over.

        Returns:
            What the checkpoint was made of; its ``progress.batch`` is the number of the next
            batch, its ``notes`` are those given to `save`.

        Raises:
            CheckpointError: no checkpoint is whole, or it does not fit this pipeline.
        """
        return self._saving.load(Path(folder))

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The newest weights and the buffers, under the names of ``nn.Sequential(*layers)``, on
        the CPU of rank 0; ``None`` elsewhere. Tied weights share a tensor, buffers are the first
        replica's. Drains first; every rank calls it."""
        return self._call(lambda rank: rank.state_dict())[0]

    def timeline(self) -> Timeline | None:
        """What every rank did in its last batches, on rank 0; ``None`` elsewhere. Drains first;
        every rank calls it."""
        return self._call(lambda rank: rank.timeline())[0]

    def check_replicas(self) -> None:
        """Make sure that the replicas of each stage have the same weights. Drains first; every
        rank calls it.

        Raises:
            RuntimeError: they do not.
        """
        self._call(lambda rank: rank.check_replicas())

    def first_non_finite(self) -> NonFinite | None:
        """Where values that are not finite first came from a layer (or the loss function) in
        training, of all ranks; ``None`` if they never did. Drains first; every rank calls it."""
        return self._call(lambda rank: rank.first_non_finite())[0]

    def close(self) -> None:
        """End this pipeline's threads. A checkpoint that is being written is then lost: see
        `wait_until_saved`, which leaving a ``with`` block without an error calls."""
        if self._watchdog is not None:
            self._watchdog.close()
        for rank in self._ranks:
            rank.close()
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
        if error is None:
            self.wait_until_saved()
        self.close()

    def _checked(
        self, name: str, num_microbatches: int, extra_in_flight: int, update_lag: int | None
    ) -> ScheduleChoice:
        options = {"extra_in_flight": extra_in_flight} if extra_in_flight else {}
        if update_lag is not None:
            options["update_lag"] = update_lag
        choice = ScheduleChoice(name, num_microbatches, options)
        check_schedule(
            choice, self.num_stages, lookahead=self._lookahead, recompute=self._recompute
        )
        if name == "weight-stashing" and self._skips:
            setting, remedy = "precision = 'fp16'", "use 'bf16'"
            if self._precision != "fp16":
                setting, remedy = "skip_non_finite", "leave it out, or use another schedule"
            raise ValueError(
                f"{setting} does not go with schedule = 'weight-stashing': its updates cannot wait "
                f"for the overflows of other stages; {remedy}"
            )
        return choice

    def _parts(
        self,
        inputs: Value | None,
        targets: Value | None,
        num_microbatches: int,
        *,
        needs_targets: bool = True,
    ) -> tuple[list[Value | None], list[Value | None]]:
        """A batch's part for each replica of this process, by replica; refused before any stage
        begins it if it does not fit."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ValueError(
                "torch.autocast is on; it does not reach backwards that run again what was not "
                "kept, nor stages that are threads. Use precision = 'bf16' or 'fp16' instead"
            )
        num_parts = self._ranks[-1].mesh.replica + 1 if self._threads else 1
        sizes: dict[str, int] = {}
        for value, what, needed in (
            (inputs, "inputs", self.is_first_stage),
            (targets, "targets", self.is_last_stage and needs_targets),
        ):
            if needed and value is None:
                raise ValueError(f"{what} is None, but this process has the stage that needs them")
            if value is not None:
                sizes[what] = count_samples(value, what, num_microbatches * num_parts)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"inputs and targets have different numbers of samples: {sizes}")
        if not self._threads:
            replica = self._ranks[0].mesh.replica
            return [inputs] * (replica + 1), [targets] * (replica + 1)
        return _split(inputs, num_parts), _split(targets, num_parts)

    def _call(
        self, function: Callable[[Rank], Result], *, wait_for_all: bool = True
    ) -> list[Result]:
        """Call ``function`` for this process's ranks.

        Returns:
            Their results; only the first one's where the others need not have ended.
        """
        if not self._threads:
            return [function(self._ranks[0])]
        if self._failure is not None:
            raise RuntimeError(
                f"this pipeline has failed ({self._failure}); make a new one"
            ) from self._failure
        calls = [
            thread.submit(_guarded, function, rank)
            for thread, rank in zip(self._threads, self._ranks, strict=True)
        ]
        self._running += calls
        _wait_for(self._running if wait_for_all else calls[:1], self._running)
        if any(call.done() and call.exception() for call in self._running):
            self._failure = self._first_failure()
            raise self._failure
        self._running = [call for call in self._running if not call.done()]
        return [call.result() for call in (calls if wait_for_all else calls[:1])]

    def _first_failure(self) -> BaseException:
        """The error that started it: the other stages then fail for want of that one, each when
        it next needs another; one that hangs in a layer is not waited for longer than that."""
        wait(self._running, self._timeout)
        ended = [call for call in self._running if call.done()]
        errors = [error for call in ended if (error := call.exception()) is not None]
        return next((e for e in errors if not isinstance(e, TransportError)), errors[0])


def _guarded(function: Callable[[Rank], Result], rank: Rank) -> Result:
    """Call ``function`` on a rank's thread; let the other ranks know if it fails."""
    try:
        return function(rank)
    except BaseException as error:
        rank.fail(error)
        raise


def _wait_for(calls: Sequence[Future[Any]], running: Sequence[Future[Any]]) -> None:
    """Wait until ``calls`` have ended, or one of those ``running`` has failed."""
    waiting = set(running)
    while not all(call.done() for call in calls):
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        if any(call.exception() for call in done):
            return


def _split(value: Value | None, num_parts: int) -> list[Value | None]:
    if value is None:
        return [None] * num_parts
    tensors = value if isinstance(value, tuple) else (value,)
    (size,) = {tensor.shape[0] for tensor in tensors if tensor is not None}
    return [*split(value, split_sizes(size, num_parts))]


def _at_least_0(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} = {value}; it must be at least 0")
    return value


def _num_stages(pp: int | None, dp: int, world_size: int | None) -> int:
    if dp < 1:
        raise ValueError(f"dp = {dp}; it must be at least 1")
    if world_size is None:
        if pp is None:
            raise ValueError("pp is None, but there is no process group to take it from; set pp")
        if pp < 1:
            raise ValueError(f"pp = {pp}; it must be at least 1")
        return pp
    stages = world_size // dp if pp is None else pp
    if stages * dp != world_size:
        raise ValueError(
            f"pp = {pp} and dp = {dp} do not fit the process group of {world_size} ranks: pp * dp "
            f"must be {world_size}"
        )
    return stages
