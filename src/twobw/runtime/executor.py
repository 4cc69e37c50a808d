"""`Executor`: runs a rank's ops, one dispatch loop from op kind to handler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from twobw.core.ops import Op, OpKind
from twobw.runtime.batch import Batch
from twobw.runtime.finiteness import FiniteWatch
from twobw.runtime.mesh import Mesh
from twobw.runtime.messages import Message, Value, map_value
from twobw.runtime.optimization import Optimization
from twobw.runtime.precision import LossScaler, cast
from twobw.runtime.recorder import Recorder
from twobw.runtime.reduction import Gradients, Reduced, Reduction
from twobw.runtime.stage import Stage
from twobw.runtime.transport import Channel, Known, Promised
from twobw.runtime.weights import VersionedWeights

LossFunction: TypeAlias = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]
"""``(output, target)`` -> mean over the microbatch, or ``(sum, weight)``."""


class Executor:
    """Carries out the ops of one rank.

    Args:
        mesh: this rank's place; stages ``mesh.stage - 1`` and ``mesh.stage + 1`` are its peers.
        stage: the layers.
        weights: their versions.
        reduction: what gradients go through before an update.
        optimization: what an update does.
        device: where batches go; ``None``: they stay where they are.
        scaler: the loss scale, in fp16.
        loss_function: used on the last stage.
        recorder: notes what ran when.
        watch: is told the version that layers run on.

    Attributes:
        batches: those under way, by the number that ops have for them.
        microbatches_per_update: of the schedule.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        stage: Stage,
        weights: VersionedWeights,
        reduction: Reduction,
        optimization: Optimization,
        device: torch.device | None,
        scaler: LossScaler | None,
        loss_function: LossFunction,
        recorder: Recorder,
        watch: FiniteWatch,
    ) -> None:
        self.batches: dict[int, Batch] = {}
        self.microbatches_per_update = 1
        self._mesh = mesh
        self._device = device
        self._is_last_stage = mesh.stage == mesh.pp - 1
        self._transport = mesh.transport
        self._stage = stage
        self._weights = weights
        self._reduction = reduction
        self._optimization = optimization
        self._scaler = scaler
        self._loss_function = loss_function
        self._recorder = recorder
        self._watch = watch
        self._received: dict[tuple[Channel, int], Message] = {}
        self._to_send: dict[tuple[Channel, int], Message] = {}
        self._awaits_gradient: set[int] = set()
        self._gradients: dict[int, Gradients] = {}  # by the version that their update makes
        self._reductions: dict[int, Future[Reduced]] = {}
        self._handlers: dict[OpKind, Callable[[Op], None]] = {
            OpKind.RECV_ACTIVATION: self._receive_activation,
            OpKind.FORWARD: self._forward,
            OpKind.SEND_ACTIVATION: self._send_activation,
            OpKind.RECV_GRADIENT: self._receive_gradient,
            OpKind.BACKWARD: self._backward,
            OpKind.SEND_GRADIENT: self._send_gradient,
            OpKind.REDUCE: self._reduce,
            OpKind.UPDATE: self._update,
        }

    def run(self, ops: Iterable[Op]) -> None:
        """Carry out ``ops`` in order. An error keeps its type and says where it happened."""
        activity = self._mesh.activity
        for op in ops:
            activity.begin(op)
            try:
                if op.kind is OpKind.UPDATE:  # a wait, which is no busy time
                    activity.result(self._reductions[op.version], "its own reduction")
                if op.kind is OpKind.REDUCE:
                    self._reduce(op)  # records itself, from when it runs
                else:
                    with self._recorder.timed(op):
                        self._handlers[op.kind](op)
                    activity.end(op)
            except Exception as error:
                error.add_note(
                    f"on stage {self._mesh.stage}, in {op.kind.name} of microbatch "
                    f"{op.microbatch} (batch {op.batch}, weight version {op.version}); "
                    f"the last op that ended here: {activity.last_op or 'none'}"
                )
                raise

    def _receive_activation(self, op: Op) -> None:
        message = self._transport.receive(self._mesh.stage - 1, Channel.ACTIVATION)
        self._received[Channel.ACTIVATION, op.microbatch] = message

    def _forward(self, op: Op) -> None:
        batch = self.batches[op.batch]
        place = op.microbatch % len(batch.sizes)
        self._install(op)
        output = self._stage.forward(
            op.microbatch,
            batch=batch.header.batch,
            place=self._mesh.replica * len(batch.sizes) + place,
            value=self._input(batch, op.microbatch, place),
            then=(lambda output: self._loss(batch, place, output)) if batch.has_loss else None,
        )
        if self._is_last_stage:
            if not batch.has_loss:
                assert not isinstance(output, Message), "without gradients nothing is run again"
                batch.outputs.append(output)
            elif place == len(batch.sizes) - 1:
                self._end_forwards(batch)
            return
        message = output if isinstance(output, Message) else Message.of(output)
        self._to_send[Channel.ACTIVATION, op.microbatch] = message
        if message.wanting:
            self._awaits_gradient.add(op.microbatch)
            self._transport.expect(self._mesh.stage + 1, Channel.GRADIENT, batch.key(place))

    def _install(self, op: Op) -> None:
        # the update that takes batch k's gradient is applied to version k
        self._weights.install(op.version, is_stale=op.version < op.batch)
        self._watch.version = op.version

    def _input(self, batch: Batch, microbatch: int, place: int) -> Value | Message:
        if batch.inputs is None:
            return self._received.pop((Channel.ACTIVATION, microbatch))
        value = self._moved(batch.inputs[place])
        return cast(value, self._weights.dtype) if self._weights.is_mixed else value

    def _moved(self, value: Value) -> Value:
        """Part of a batch where this stage computes; from pinned memory without blocking."""
        if self._device is None:
            return value
        return map_value(partial(Tensor.to, device=self._device, non_blocking=True), value)

    def _end_forwards(self, batch: Batch) -> None:
        """On the last stage: let all stages know the loss, which all replicas have part in."""
        replicas = self._reduction.replicas

        def sum_up() -> list[float]:
            numbers = batch.sum_up(replicas)
            for stage in range(self._mesh.stage):
                self._transport.push(stage, Channel.LOSS, numbers)
            return numbers

        if replicas.size == 1 and self._reduction.device.type == "cpu":
            batch.note = Known(sum_up())
        else:
            batch.note = Promised(self._reduction.submit(sum_up), self._mesh.activity)

    def _loss(self, batch: Batch, place: int, output: Value) -> Tensor:
        """The loss of one microbatch as its backward starts from it: scaled by its share of what
        the update takes. Sums are left as they are, since their weight is known only when the
        batch's last forward is over: the update divides by it."""
        assert batch.targets is not None, "the last stage has targets"
        if self._weights.is_mixed:
            output = cast(output, torch.float32)
        result = self._loss_function(output, self._moved(batch.targets[place]))
        loss, weight = result if isinstance(result, tuple) else (result, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn gave {shape}; it must give a scalar tensor: the mean over the "
                "microbatch, or (sum, weight)"
            )
        if weight is not None:
            batch.add_sum(loss.detach(), float(weight))
            if self._updates_by_microbatch(batch):
                if self._reduction.replicas.size > 1:
                    raise ValueError(
                        "loss_fn gave (sum, weight), which with replicas does not go with an "
                        "update after every microbatch (weight-stashing): other stages do not "
                        "know the weights in time. Give the mean, or use another schedule"
                    )
                loss = loss / weight if float(weight) else loss
        else:
            batch.add_mean(loss.detach(), place)
            if not self._updates_by_microbatch(batch):
                loss = loss * batch.share(place)
        return loss if self._scaler is None else loss * self._scaler.scale(batch.header.batch)

    def _updates_by_microbatch(self, batch: Batch) -> bool:
        """Whether an update takes less than the batch. One of a single microbatch takes all."""
        return self.microbatches_per_update < len(batch.sizes)

    def _send_activation(self, op: Op) -> None:
        self._send(op, self._mesh.stage + 1, Channel.ACTIVATION)

    def _receive_gradient(self, op: Op) -> None:
        if op.microbatch in self._awaits_gradient:
            message = self._transport.receive(self._mesh.stage + 1, Channel.GRADIENT)
            self._received[Channel.GRADIENT, op.microbatch] = message

    def _backward(self, op: Op) -> None:
        made = op.microbatch // self.microbatches_per_update + 1
        if made not in self._gradients:
            self._gradients[made] = [None] * len(self._weights.names)
        gradients: tuple[Tensor | None, ...] | None = None if self._is_last_stage else ()
        if op.microbatch in self._awaits_gradient:
            self._awaits_gradient.remove(op.microbatch)
            gradients = self._received.pop((Channel.GRADIENT, op.microbatch)).tensors
        self._install(op)
        with self._weights.accumulate(self._gradients[made]):
            input_gradients = self._stage.backward(op.microbatch, gradients)
        if input_gradients:
            self._to_send[Channel.GRADIENT, op.microbatch] = Message.of(input_gradients)

    def _send_gradient(self, op: Op) -> None:
        if (Channel.GRADIENT, op.microbatch) in self._to_send:
            self._send(op, self._mesh.stage - 1, Channel.GRADIENT)

    def _send(self, op: Op, peer: int, channel: Channel) -> None:
        batch = self.batches[op.batch]
        key = batch.key(op.microbatch % len(batch.sizes))
        self._transport.send(peer, channel, key, self._to_send.pop((channel, op.microbatch)))

    def _reduce(self, op: Op) -> None:
        batch = self.batches[op.batch]
        gradients = self._gradients.pop(op.version)
        self._reductions[op.version] = self._reduction.submit(
            partial(self._reduced, op, batch, gradients)
        )

    def _reduced(self, op: Op, batch: Batch, gradients: Gradients) -> Reduced:
        with self._recorder.timed(op):
            reduced = self._reduction.reduce(gradients, self._divisor(op, batch))
        self._mesh.activity.end(op)
        return reduced

    def _divisor(self, op: Op, batch: Batch) -> float:
        if self._updates_by_microbatch(batch):
            divisor = self._reduction.divisor(batch.sizes[op.microbatch % len(batch.sizes)])
        else:
            divisor = batch.divisor()
        if self._scaler is not None:
            divisor *= self._scaler.scale(batch.header.batch)
        return divisor

    def _update(self, op: Op) -> None:
        batch = self.batches[op.batch]
        reduced = self._reductions.pop(op.version).result()
        if reduced.has_overflowed:
            self._weights.update([None] * len(reduced.gradients), lambda _: None)
        else:
            self._weights.update(reduced.gradients, self._optimization.step)
        batch.grad_norm, batch.is_skipped = reduced.norm, reduced.has_overflowed
        if (op.microbatch + 1) % len(batch.sizes) == 0:
            if self._scaler is not None:
                self._scaler.end_batch(has_overflowed=reduced.has_overflowed)
            self._optimization.end_batch()
            del self.batches[op.batch]
