"""`Rank`: one stage of a pipeline, and what it does for each call of `Pipeline`."""

from __future__ import annotations

import json
import resource
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twobw.core.generators import stage_program
from twobw.core.lowering import lower_ops
from twobw.core.ops import Op, OpKind
from twobw.core.timeline import Span, Timeline
from twobw.runtime.batch import HEADER_LENGTH, Batch, BatchHeader, count_samples, split_sizes
from twobw.runtime.executor import Executor, LossFunction
from twobw.runtime.messages import Message, Value, map_value
from twobw.runtime.optimization import Optimization, OptimizerFactory, SchedulerFactory
from twobw.runtime.randomness import LayerRunner
from twobw.runtime.recorder import Recorder, lane_of
from twobw.runtime.results import StepResult
from twobw.runtime.stage import Stage
from twobw.runtime.transport import Channel, Note, Transport
from twobw.runtime.weights import VersionedWeights

_LOSS_LENGTH = 2
_METRICS_LENGTH = 3
_KEPT_RESULTS = 3  # the numbers of the last results may still be on their way
_EVALUATION = -1  # the number of an evaluation's batch among the executor's batches


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """A schedule by name, its microbatches a batch, its options."""

    name: str
    num_microbatches: int
    options: dict[str, int]


class Rank:
    """One stage.

    Args:
        index: the stage's number.
        num_stages: of the pipeline.
        layers: the stage's modules.
        first_layer: place of the first of them in the unsplit model.
        loss_function: used on the last stage.
        make_optimizer: from this stage's named parameters to optimizers.
        make_scheduler: from an optimizer to its learning-rate scheduler.
        schedule: what to run.
        transport: to the other stages.
        runner: sets the random generator before each layer.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        layers: Sequence[nn.Module],
        first_layer: int,
        *,
        loss_function: LossFunction,
        make_optimizer: OptimizerFactory,
        make_scheduler: SchedulerFactory | None,
        schedule: ScheduleChoice,
        transport: Transport,
        runner: LayerRunner,
    ) -> None:
        self.index = index
        self.num_stages = num_stages
        self._first_layer = first_layer
        self._schedule = schedule
        self._transport = transport
        self._program = stage_program(
            schedule.name, index, num_stages, schedule.num_microbatches, **schedule.options
        )
        self._stage = Stage(layers, first_layer, runner)
        self._weights = VersionedWeights(
            [(str(number), layer) for number, layer in enumerate(layers, first_layer)],
            self._program.rule.num_versions,
        )
        optimization = Optimization(
            self._weights.optimizer_parameters(), make_optimizer, make_scheduler
        )
        self._recorder = Recorder(index)
        self._executor = Executor(
            index,
            num_stages,
            stage=self._stage,
            weights=self._weights,
            optimization=optimization,
            loss_function=loss_function,
            transport=transport,
            recorder=self._recorder,
            microbatches_per_update=self._program.rule.microbatches_per_update,
        )
        self._layout_keys: dict[object, int] = {}
        self._next_batch = 0
        self._stop_requested = False
        self._results: deque[StepResult] = deque()

    def train_step(self, inputs: Value | None, targets: Value | None) -> StepResult:
        """See `Pipeline.train_step`."""
        batch = self._begin(
            self._next_batch, inputs, targets, self._schedule.num_microbatches, mode="train"
        )
        self._executor.batches[self._next_batch] = batch
        self._next_batch += 1
        metrics = self._listen_metrics()
        self._run(self._program.begin_batch())
        own = [self._recorder.take_busy_fraction(), float(self._weights.num_slots), _peak_bytes()]
        if metrics is None:
            self._transport.push(0, Channel.METRICS, own)
        result = StepResult(batch, None if metrics is None else [own, *metrics])
        self._results.append(result)
        if len(self._results) > _KEPT_RESULTS:
            self._results.popleft().settle()
        return result

    def request_stop(self) -> None:
        """See `Pipeline.request_stop`."""
        self._stop_requested = True

    def drain(self) -> None:
        """See `Pipeline.drain`."""
        self._run(self._program.drain())
        while self._results:
            self._results.popleft().settle()

    def evaluate(
        self, inputs: Value | None, targets: Value | None, num_microbatches: int | None
    ) -> float:
        """See `Pipeline.evaluate`."""
        self.drain()
        count = num_microbatches or self._schedule.num_microbatches
        batch = self._begin(self._next_batch, inputs, targets, count, mode="evaluate")
        self._executor.batches[_EVALUATION] = batch
        version = self._weights.newest
        with self._stage.evaluating():
            self._run(
                Op(OpKind.FORWARD, self.index, microbatch, _EVALUATION, version)
                for microbatch in range(count)
            )
        del self._executor.batches[_EVALUATION]
        return batch.loss()

    def state_dict(self) -> dict[str, Tensor] | None:
        """See `Pipeline.full_state_dict`."""
        self.drain()
        self._weights.install(self._weights.newest)
        state = {
            f"{number}.{name}": tensor.detach().cpu()
            for number, layer in enumerate(self._stage.layers, self._first_layer)
            for name, tensor in layer.state_dict().items()
        }
        if self.index > 0:
            names = torch.tensor(list(json.dumps(list(state)).encode()), dtype=torch.uint8)
            self._send_state(names)
            self._send_state(tuple(state.values()))
            return None
        state = {name: tensor.clone() for name, tensor in state.items()}
        for stage in range(1, self.num_stages):
            (names_,) = self._receive_state(stage)
            tensors = self._receive_state(stage)
            names = json.loads(bytes(names_.tolist()))
            state.update(zip(names, tensors, strict=True))
        return state

    def timeline(self) -> Timeline | None:
        """See `Pipeline.timeline`."""
        self.drain()
        spans = self._recorder.spans()
        rows = [_span_numbers(span) for span in spans if span.op.batch != _EVALUATION]
        own = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), _SPAN_LENGTH)
        if self.index > 0:
            self._send_state(own)
            return None
        tables = [own, *(self._receive_state(s)[0] for s in range(1, self.num_stages))]
        gathered = (_span(row, rank) for rank, table in enumerate(tables) for row in table.tolist())
        return Timeline(tuple(gathered), "measured")

    def fail(self, error: BaseException) -> None:
        """Let the other stages know that this one has failed."""
        self._transport.fail(f"{type(error).__name__}: {error}")

    def _begin(
        self,
        number: int,
        inputs: Value | None,
        targets: Value | None,
        num_microbatches: int,
        *,
        mode: str,
    ) -> Batch:
        """Agree with the other stages on a batch, and expect what will come of it."""
        is_first_stage, is_last_stage = self.index == 0, self.index == self.num_stages - 1
        if is_first_stage:
            if inputs is None:
                raise ValueError("inputs is None on the first stage, which needs them")
            header = self._header(number, inputs, num_microbatches, mode)
        else:
            numbers = self._transport.listen(self.index - 1, Channel.CONTROL, HEADER_LENGTH).wait()
            header = BatchHeader.of(numbers)
        if not is_last_stage:
            self._transport.push(self.index + 1, Channel.CONTROL, header.numbers())
        if is_last_stage:
            _check_targets(targets, header, num_microbatches)
        batch = Batch(
            header,
            num_microbatches,
            inputs=inputs if is_first_stage else None,
            targets=targets if is_last_stage else None,
            note=None if is_last_stage else self._listen_loss(),
            push=self._push_loss if is_last_stage else None,
        )
        if not is_first_stage:
            for place in range(num_microbatches):
                self._transport.expect(self.index - 1, Channel.ACTIVATION, batch.key(place))
        return batch

    def _header(self, number: int, inputs: Value, num_microbatches: int, mode: str) -> BatchHeader:
        samples = count_samples(inputs, "inputs", num_microbatches)
        sizes = split_sizes(samples, num_microbatches)
        return BatchHeader(
            number,
            samples,
            self._layout_key(inputs, sizes[0], mode),
            self._layout_key(inputs, sizes[-1], mode),
            self._stop_requested,
        )

    def _layout_key(self, inputs: Value, size: int, mode: str) -> int:
        """The number of what stages give for a microbatch of ``size`` samples."""
        layout = Message.of(map_value(lambda tensor: tensor[:size], inputs)).layout
        return self._layout_keys.setdefault((mode, layout), len(self._layout_keys))

    def _run(self, ops: Iterable[Op]) -> None:
        self._executor.run(
            lower_ops(
                ops,
                range(self.num_stages),
                microbatches_per_update=self._program.rule.microbatches_per_update,
            )
        )

    def _listen_loss(self) -> Note:
        return self._transport.listen(self.num_stages - 1, Channel.LOSS, _LOSS_LENGTH)

    def _push_loss(self, numbers: list[float]) -> None:
        for stage in range(self.num_stages - 1):
            self._transport.push(stage, Channel.LOSS, numbers)

    def _listen_metrics(self) -> list[Note] | None:
        if self.index > 0:
            return None
        return [
            self._transport.listen(stage, Channel.METRICS, _METRICS_LENGTH)
            for stage in range(1, self.num_stages)
        ]

    def _send_state(self, value: Value) -> None:
        self._transport.send(0, Channel.STATE, None, Message.of(value))

    def _receive_state(self, stage: int) -> list[Tensor]:
        self._transport.expect(stage, Channel.STATE, None)
        tensors = self._transport.receive(stage, Channel.STATE).tensors
        return [tensor for tensor in tensors if tensor is not None]


def _check_targets(targets: Value | None, header: BatchHeader, num_microbatches: int) -> None:
    if targets is None:
        raise ValueError("targets is None on the last stage, which needs them")
    samples = count_samples(targets, "targets", num_microbatches)
    if samples != header.num_samples:
        raise ValueError(f"targets have {samples} samples, inputs have {header.num_samples}")


def _peak_bytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


_SPAN_LENGTH = 7
_KINDS = list(OpKind)


def _span_numbers(span: Span) -> list[int]:
    op = span.op
    kind = _KINDS.index(op.kind)
    return [kind, op.stage, op.microbatch, op.batch, op.version, span.start_ns, span.end_ns]


def _span(numbers: list[int], rank: int) -> Span:
    kind, stage, microbatch, batch, version, start_ns, end_ns = numbers
    op = Op(_KINDS[kind], stage, microbatch, batch, version)
    return Span(op, rank, lane_of(op), start_ns, end_ns)
