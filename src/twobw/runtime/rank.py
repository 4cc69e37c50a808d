"""`Rank`: one stage of a pipeline, and what it does for each call of `Pipeline`."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from twobw.core.generators import stage_program
from twobw.core.lowering import lower_ops
from twobw.core.ops import Op, OpKind
from twobw.core.timeline import Timeline
from twobw.runtime.batch import (
    HEADER_LENGTH,
    Batch,
    BatchHeader,
    count_samples,
    split_sizes,
)
from twobw.runtime.checkpoint.manifest import Progress
from twobw.runtime.checkpoint.reading import Stored
from twobw.runtime.checkpoint.writing import Part
from twobw.runtime.collectives import same_everywhere
from twobw.runtime.executor import Executor, LossFunction
from twobw.runtime.finiteness import FiniteWatch, NonFinite
from twobw.runtime.layers import ConstantBuffers, TiedNames, owners_names
from twobw.runtime.mesh import Mesh
from twobw.runtime.messages import Message, Value, map_value
from twobw.runtime.optimization import Optimization, OptimizerFactory, SchedulerFactory
from twobw.runtime.precision import LossScaler, cast_rest, compute_dtype
from twobw.runtime.randomness import LayerRunner
from twobw.runtime.rank_state import RankState
from twobw.runtime.recorder import SPAN_LENGTH, Recorder, peak_bytes, span_numbers, span_of
from twobw.runtime.reduction import Reduction, Tie
from twobw.runtime.results import StepResult
from twobw.runtime.schedules import ScheduleChoice
from twobw.runtime.stage import Stage
from twobw.runtime.transport import Channel, Note, Transport
from twobw.runtime.weights import VersionedWeights

_LOSS_LENGTH = 2  # of what Batch.sum_up gives
_METRICS_LENGTH = 3
_KEPT_RESULTS = 3  # the numbers of the last results may still be on their way
_MEASURED_BATCHES = 8  # flushed first, where the update lag is to be measured
_EVALUATION = -1  # the number of an evaluation's batch among the executor's batches


@dataclass(frozen=True, slots=True)
class Settings:
    """What all ranks of a pipeline have in common.

    Attributes are those of `Pipeline`'s arguments of the same names.
    """

    loss_fn: LossFunction
    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None
    precision: str
    recompute: str
    max_grad_norm: float | None
    shard_optimizer: bool
    overlap_reduce: bool
    lookahead: float
    flush_batches: int
    skip_non_finite: bool
    reduces: bool  # whether the updates of some stage need other ranks


class Rank:
    """One stage of one replica.

    Args:
        mesh: its place, and what it talks through.
        layers: the stage's modules.
        first_layer: place of the first of them in the unsplit model.
        ties: names of parameters that several stages have, in an order that all stages share.
        shared_buffers: names of buffers that several stages have.
        settings: of the pipeline.
        schedule: what to run.
        runner: sets the random generator before each layer.
    """

    def __init__(
        self,
        mesh: Mesh,
        layers: Sequence[nn.Module],
        first_layer: int,
        ties: Sequence[TiedNames],
        shared_buffers: Sequence[TiedNames],
        *,
        settings: Settings,
        schedule: ScheduleChoice,
        runner: LayerRunner,
    ) -> None:
        self.mesh = mesh
        if mesh.device is not None:
            for layer in layers:
                layer.to(mesh.device)
        own_device = mesh.device or _device_of(layers)
        self._device = own_device or torch.device("cpu")
        self._runner = runner
        self._ties = ties
        self._settings = settings
        self._watch = FiniteWatch(mesh.stage, mesh.replica)
        self._stage = Stage(layers, first_layer, runner, settings.recompute, self._watch)
        dtype = compute_dtype(settings.precision)
        if dtype != torch.float32:
            cast_rest(layers, dtype)
        self._weights = VersionedWeights(
            [(str(number), layer) for number, layer in enumerate(layers, first_layer)],
            1,
            dtype,
            settings.lookahead,
        )
        self._reduction = Reduction(
            mesh.replicas,
            mesh.stages,
            [parameter for _, parameter in self._weights.optimizer_parameters()],
            self._device,
            ties=_own_ties(mesh, ties, self._weights.names),
            max_grad_norm=settings.max_grad_norm,
            looks_for_overflow=settings.precision == "fp16" or settings.skip_non_finite,
        )
        self._shared_buffers = [name for tie in shared_buffers for name in tie.names]
        self._constants = self._constant_buffers()
        self._recorder = Recorder(mesh.rank, self._device)
        self._scaler = LossScaler() if settings.precision == "fp16" else None
        optimization = Optimization(
            self._named_as_owned(),
            settings.optimizer,
            settings.lr_scheduler,
            mesh.shards if settings.shard_optimizer else None,
        )
        self._state = RankState(mesh, self._stage, self._weights, optimization, ties)
        self._executor = Executor(
            mesh,
            stage=self._stage,
            weights=self._weights,
            reduction=self._reduction,
            optimization=optimization,
            device=own_device,
            scaler=self._scaler,
            loss_function=settings.loss_fn,
            recorder=self._recorder,
            watch=self._watch,
        )
        self._layout_keys: dict[object, int] = {}
        self._next_batch = 0
        self._stop_requested = False
        self._results: deque[StepResult] = deque()
        self._wanted = schedule
        self._to_come: ScheduleChoice | None = None
        self._flush_batches = settings.flush_batches
        if not self._flush_batches and schedule.wants_lag and self._hides_reductions:
            self._flush_batches = _MEASURED_BATCHES
        self._start_wanted(0)

    @property
    def update_lag(self) -> int | None:
        """See `Pipeline.update_lag`."""
        return self._schedule.options.get("update_lag")

    def set_schedule(self, schedule: ScheduleChoice) -> None:
        """See `Pipeline.set_schedule`."""
        self.drain()
        self._wanted = schedule
        self._to_come = None
        self._start(schedule, self._next_batch)
        self._recorder.forget()

    def _start_wanted(self, origin: int) -> None:
        """Begin the schedule that was asked for, or the flush that comes before it."""
        schedule = self._wanted
        self._to_come = None
        if self._next_batch < self._flush_batches:
            self._to_come = schedule
            schedule = ScheduleChoice("1f1b", schedule.num_microbatches, {})
        self._start(schedule, origin)

    def _start(self, schedule: ScheduleChoice, origin: int) -> None:
        """Begin a schedule whose version rule counts from batch ``origin``; nothing is in flight.
        But for its number, the newest weights are the only version there is."""
        mesh = self.mesh
        if schedule.wants_lag:
            schedule = schedule.lagging(
                self._measured_lag(schedule) if self._hides_reductions else 0
            )
        defers = self._settings.overlap_reduce and self._reduction.needs_other_ranks
        options = schedule.deferred() if defers else schedule.options
        self._schedule = schedule
        self._origin = origin
        self._program = stage_program(
            schedule.name,
            mesh.stage,
            mesh.pp,
            schedule.num_microbatches,
            first_batch=self._next_batch - origin,
            **options,
        )
        self._weights.rebase(
            self._program.rule.num_versions,
            may_change_in_flight=self._program.rule.backward_on_newest,
        )
        self._executor.microbatches_per_update = self._program.rule.microbatches_per_update

    def train_step(self, inputs: Value | None, targets: Value | None) -> StepResult:
        """See `Pipeline.train_step`."""
        if self._to_come is not None and self._next_batch == self._flush_batches:
            self.set_schedule(self._to_come)
        count = self._schedule.num_microbatches
        batch = self._begin(self._next_batch, inputs, targets, count, mode="train")
        self._executor.batches[self._next_batch - self._origin] = batch
        self._next_batch += 1
        metrics = self._listen_metrics()
        self._run(self._program.begin_batch())
        if batch.header.batch == 0:
            self._constants.check(self._buffers())
        own = [
            self._recorder.take_busy_fraction(),
            float(self._weights.num_slots),
            peak_bytes(self._device),
        ]
        if metrics is None:
            self.mesh.transport.push(0, Channel.METRICS, own)
        result = StepResult(batch, None if metrics is None else [own, *metrics])
        self._results.append(result)
        if len(self._results) > _KEPT_RESULTS:
            self._results.popleft().settle()
        self._watch.look(batch.header.batch)
        return result

    def request_stop(self) -> None:
        """See `Pipeline.request_stop`."""
        self._stop_requested = True

    def drain(self) -> None:
        """See `Pipeline.drain`."""
        self._run(self._program.drain())
        self._constants.check(self._buffers())
        while self._results:
            self._results.popleft().settle()

    def evaluate(self, inputs: Value | None, targets: Value | None, num_microbatches: int) -> float:
        """See `Pipeline.evaluate`."""
        return self._run_forwards(inputs, targets, num_microbatches, mode="evaluate").loss()

    def forward(self, inputs: Value | None, num_microbatches: int) -> list[Value]:
        """The outputs by microbatch, on the last stage; see `Pipeline.forward`."""
        return self._run_forwards(inputs, None, num_microbatches, mode="forward").outputs

    def state_dict(self) -> dict[str, Tensor] | None:
        """See `Pipeline.full_state_dict`."""
        self.drain()
        if self.mesh.replica > 0:
            return None
        self._weights.install(self._weights.newest)
        state = self._own_state()
        if self.mesh.stage > 0:
            names = torch.tensor(list(json.dumps(list(state)).encode()), dtype=torch.uint8)
            self._send_state(names)
            self._send_state(tuple(state.values()))
            return None
        for stage in range(1, self.mesh.pp):
            (encoded,) = self._receive_state(stage)
            names = json.loads(bytes(encoded.tolist()))
            state.update(zip(names, self._receive_state(stage), strict=True))
        for tie in self._ties:
            state.update(dict.fromkeys(tie.aliases, state[tie.names[0]]))
        return state

    def part(self) -> Part:
        """This rank's part of a checkpoint; drains first."""
        self.drain()
        self._recorder.take_busy_fraction()  # the next batch's is to be its own
        return self._state.part()

    def progress(self, split: Sequence[int]) -> Progress:
        """How far the pipeline has come, drained; the same on every rank."""
        scales, good_batches = self._scaler.history() if self._scaler else (None, 0)
        schedule = self._schedule
        return Progress(
            batch=self._next_batch,
            origin=self._origin,
            num_layers=sum(split),
            pp=self.mesh.pp,
            dp=self.mesh.dp,
            split=list(split),
            schedule=schedule.name,
            num_microbatches=schedule.num_microbatches,
            updates_by_microbatch=self._updates_by_microbatch,
            update_lag=self.update_lag,
            loss_scales=scales,
            good_batches=good_batches,
        )

    def restore(self, stored: Stored) -> None:
        """See `Pipeline.load`."""
        self.drain()
        before = stored.manifest.progress
        self._next_batch = before.batch
        if self._wanted.wants_lag and self._hides_reductions:
            self._restore_lag(before)
        self._start_wanted(before.origin)
        batches, rule = before.batch - before.origin, self._program.rule
        self._state.restore(
            stored,
            batches * self._schedule.num_microbatches // rule.microbatches_per_update,
            same_versions=self._updates_by_microbatch == before.updates_by_microbatch,
        )
        self._constants = self._constant_buffers()
        if self._scaler is not None and before.loss_scales is not None:
            self._scaler.restore(before.batch, before.loss_scales, before.good_batches)

    def timeline(self) -> Timeline | None:
        """See `Pipeline.timeline`."""
        self.drain()
        rows = [
            span_numbers(span) for span in self._recorder.spans() if span.op.batch != _EVALUATION
        ]
        table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), SPAN_LENGTH)
        if self.mesh.stage > 0:
            self._send_state(table)
            return None
        tables = [table, *(self._receive_state(stage)[0] for stage in range(1, self.mesh.pp))]
        own = torch.cat(tables)
        if self.mesh.replica > 0:
            self.mesh.replica_transport.send(0, Channel.STATE, None, Message.of(own))
            return None
        others = [
            receive(self.mesh.replica_transport, replica)[0] for replica in range(1, self.mesh.dp)
        ]
        spans = (span_of(row) for table in (own, *others) for row in table.tolist())
        return Timeline(tuple(spans), "measured")

    def check_replicas(self) -> None:
        """See `Pipeline.check_replicas`."""
        self.drain()
        weights = [parameter.data for _, parameter in self._weights.optimizer_parameters()]
        are_equal = same_everywhere(self.mesh.shards, weights)
        self._recorder.take_busy_fraction()  # the next batch's is to be its own
        if not are_equal:
            raise RuntimeError(
                f"the replicas of stage {self.mesh.stage} have different weights after batch "
                f"{self._next_batch - 1}; they must be equal to the bit. A layer whose gradient "
                "depends on the rank, or a failing device, can be the cause"
            )

    def first_non_finite(self) -> NonFinite | None:
        """See `Pipeline.first_non_finite`."""
        self.drain()
        return self._watch.first_of(self.mesh.stages, self.mesh.replicas)

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed."""
        self.mesh.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the reduction's thread."""
        self._reduction.close()

    def _buffers(self) -> dict[str, Tensor]:
        """This stage's, by their names in the unsplit model."""
        return {
            f"{number}.{name}": buffer
            for number, layer in enumerate(self._stage.layers, self._stage.first_layer)
            for name, buffer in layer.named_buffers(remove_duplicate=False)
        }

    def _constant_buffers(self) -> ConstantBuffers:
        """Those that other stages have, too, as they are now."""
        own = self._buffers()
        return ConstantBuffers({name: own[name] for name in self._shared_buffers if name in own})

    def _named_as_owned(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer is given. A copy of a tied weight has its owner's name, so that a
        rule on names treats all copies alike, as ``nn.Sequential.named_parameters`` has it."""
        owned = owners_names(self._ties, self.mesh.stage)
        return [(owned.get(name, name), p) for name, p in self._weights.optimizer_parameters()]

    def _restore_lag(self, before: Progress) -> None:
        """Go on with the update lag that was measured; if there is none yet, or if it was of other
        stages, replicas or microbatches, flush some more batches and measure."""
        own = self._wanted.name, self.mesh.pp, self.mesh.dp, self._wanted.num_microbatches
        its = before.schedule, before.pp, before.dp, before.num_microbatches
        if before.update_lag is not None and own == its:
            self._wanted = self._wanted.lagging(before.update_lag)
        elif before.batch >= self._flush_batches:
            self._flush_batches = before.batch + _MEASURED_BATCHES

    @property
    def _updates_by_microbatch(self) -> bool:
        """Whether a weight version is a microbatch's rather than a batch's."""
        return self._program.rule.microbatches_per_update < self._schedule.num_microbatches

    @property
    def _hides_reductions(self) -> bool:
        """Whether gradients are to be older so that no stage waits; a single stage waits."""
        is_pipeline = self.mesh.pp > 1
        return is_pipeline and self._settings.overlap_reduce and self._settings.reduces

    def _measured_lag(self, schedule: ScheduleChoice) -> int:
        """How many microbatch slots the slowest rank's reductions take, by the batches that have
        run; all slots there are, if none has."""
        times: dict[OpKind, list[int]] = {kind: [] for kind in OpKind}
        for span in self._recorder.spans():
            times[span.op.kind].append(span.end_ns - span.start_ns)
        reduce, forward, backward = (
            median(times[kind]) if times[kind] else 0
            for kind in (OpKind.REDUCE, OpKind.FORWARD, OpKind.BACKWARD)
        )
        slots = torch.tensor([math.ceil(reduce / (forward + backward)) if forward else math.inf])
        for group in (self._reduction.stages, self._reduction.replicas):
            group.all_reduce(slots, "max")
        return int(min(slots.item(), schedule.num_microbatches))

    @property
    def _is_last_stage(self) -> bool:
        return self.mesh.stage == self.mesh.pp - 1

    def _run_forwards(
        self, inputs: Value | None, targets: Value | None, num_microbatches: int, *, mode: str
    ) -> Batch:
        """Forwards of a batch on the newest weights, in eval mode; drains first."""
        self.drain()
        batch = self._begin(self._next_batch, inputs, targets, num_microbatches, mode=mode)
        self._executor.batches[_EVALUATION] = batch
        stage, version = self.mesh.stage, self._weights.newest
        with self._stage.evaluating():
            self._run(
                Op(OpKind.FORWARD, stage, microbatch, _EVALUATION, version)
                for microbatch in range(num_microbatches)
            )
        self._recorder.take_busy_fraction()  # the next batch's is to be its own
        return self._executor.batches.pop(_EVALUATION)

    def _begin(
        self,
        number: int,
        inputs: Value | None,
        targets: Value | None,
        num_microbatches: int,
        *,
        mode: str,
    ) -> Batch:
        """Agree with the other ranks on a batch, and expect what will come of it."""
        mesh, has_loss = self.mesh, mode != "forward"
        is_first_stage = mesh.stage == 0
        if is_first_stage:
            if inputs is None:
                raise ValueError("inputs is None on the first stage, which needs them")
            header = self._header(number, inputs, num_microbatches, mode)
        else:
            header = BatchHeader.of(
                mesh.transport.listen(mesh.stage - 1, Channel.CONTROL, HEADER_LENGTH).wait()
            )
        if not self._is_last_stage:
            mesh.transport.push(mesh.stage + 1, Channel.CONTROL, header.numbers())
        elif has_loss:
            _check_targets(targets, header, num_microbatches)
        mesh.activity.batch = header.batch
        batch = Batch(
            header,
            num_microbatches,
            inputs=inputs if is_first_stage else None,
            targets=targets if self._is_last_stage else None,
            has_loss=has_loss and self._is_last_stage,
            note=self._listen_loss() if has_loss and not self._is_last_stage else None,
        )
        if not is_first_stage:
            for place in range(num_microbatches):
                mesh.transport.expect(mesh.stage - 1, Channel.ACTIVATION, batch.key(place))
        return batch

    def _header(self, number: int, inputs: Value, num_microbatches: int, mode: str) -> BatchHeader:
        samples = count_samples(inputs, "inputs", num_microbatches)
        sizes = split_sizes(samples, num_microbatches)
        large, small = (self._layout_key(inputs, size, mode) for size in (sizes[0], sizes[-1]))
        return BatchHeader(number, samples, large, small, self._stops())

    def _stops(self) -> bool:
        """Whether the batch is the last: the first replica says it to the others."""
        transport = self.mesh.replica_transport
        if self.mesh.replica > 0:
            return bool(transport.listen(0, Channel.CONTROL, 1).wait()[0])
        for replica in range(1, self.mesh.dp):
            transport.push(replica, Channel.CONTROL, [self._stop_requested])
        return self._stop_requested

    def _layout_key(self, inputs: Value, size: int, mode: str) -> int:
        """The number of what stages give for a microbatch of ``size`` samples."""
        layout = Message.of(map_value(lambda tensor: tensor[:size], inputs)).layout
        return self._layout_keys.setdefault((mode, layout), len(self._layout_keys))

    def _run(self, ops: Iterable[Op]) -> None:
        lowered = lower_ops(
            ops,
            range(self.mesh.pp),
            microbatches_per_update=self._program.rule.microbatches_per_update,
            reduce=True,
        )
        with self._runner.undisturbed():
            self._executor.run(lowered)

    def _listen_loss(self) -> Note:
        return self.mesh.transport.listen(self.mesh.pp - 1, Channel.LOSS, _LOSS_LENGTH)

    def _listen_metrics(self) -> list[Note] | None:
        if self.mesh.stage > 0:
            return None
        return [
            self.mesh.transport.listen(stage, Channel.METRICS, _METRICS_LENGTH)
            for stage in range(1, self.mesh.pp)
        ]

    def _own_state(self) -> dict[str, Tensor]:
        """This stage's newest weights and buffers on the CPU, under the model's names; what
        mixed precision has cast, in fp32 again."""
        state: dict[str, Tensor] = {}
        copies: dict[Tensor, Tensor] = {}  # by identity: what is one here is one there
        for name, tensor in self._stage.tensors().items():
            if tensor not in copies:
                newest = self._weights.master_of(tensor).detach().cpu().clone()
                is_cast = self._weights.is_mixed and newest.dtype == self._weights.dtype
                copies[tensor] = newest.float() if is_cast else newest
            state[name] = copies[tensor]
        return state

    def _send_state(self, value: Value) -> None:
        self.mesh.transport.send(0, Channel.STATE, None, Message.of(value))

    def _receive_state(self, stage: int) -> list[Tensor]:
        return receive(self.mesh.transport, stage)


def _device_of(layers: Sequence[nn.Module]) -> torch.device | None:
    """Where the first parameter or buffer is, if there is any."""
    tensors = (t for layer in layers for t in (*layer.parameters(), *layer.buffers()))
    return next((tensor.device for tensor in tensors), None)


def receive(transport: Transport, peer: int) -> list[Tensor]:
    """The tensors of the next message of state."""
    transport.expect(peer, Channel.STATE, None)
    tensors = transport.receive(peer, Channel.STATE).tensors
    return [tensor for tensor in tensors if tensor is not None]


def _check_targets(targets: Value | None, header: BatchHeader, num_microbatches: int) -> None:
    if targets is None:
        raise ValueError("targets is None on the last stage, which needs them")
    samples = count_samples(targets, "targets", num_microbatches)
    if samples != header.num_samples:
        raise ValueError(f"targets have {samples} samples, inputs have {header.num_samples}")


def _own_ties(mesh: Mesh, ties: Sequence[TiedNames], names: Sequence[str]) -> list[Tie]:
    """The ties that this stage has part in, where they are trained."""
    own = []
    for tie in ties:
        name = tie.name_on.get(mesh.stage)
        if name in names:
            group = mesh.ties[frozenset(tie.name_on)]
            own.append(Tie(names.index(name), group, is_owner=mesh.stage == min(tie.name_on)))
    return own
