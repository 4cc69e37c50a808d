"""`Executor`: runs a rank's ops, one dispatch loop from op kind to handler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from twobw.core.ops import Op, OpKind
from twobw.runtime.batch import Batch
from twobw.runtime.messages import Message, Value
from twobw.runtime.optimization import Optimization
from twobw.runtime.recorder import Recorder
from twobw.runtime.stage import Stage
from twobw.runtime.transport import Channel, Transport
from twobw.runtime.weights import VersionedWeights

LossFunction: TypeAlias = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]
"""``(output, target)`` -> mean over the microbatch, or ``(sum, weight)``."""


class Executor:
    """Carries out the ops of one stage.

    Args:
        index: this stage's number; stages ``index - 1`` and ``index + 1`` are its peers.
        num_stages: of the pipeline.
        stage: the layers.
        weights: their versions.
        optimization: what an update does.
        loss_function: used on the last stage.
        transport: to the other stages.
        recorder: notes what ran when.
        microbatches_per_update: of the schedule.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        *,
        stage: Stage,
        weights: VersionedWeights,
        optimization: Optimization,
        loss_function: LossFunction,
        transport: Transport,
        recorder: Recorder,
        microbatches_per_update: int,
    ) -> None:
        self.index = index
        self.is_last_stage = index == num_stages - 1
        self.microbatches_per_update = microbatches_per_update
        self.batches: dict[int, Batch] = {}
        self._stage = stage
        self._weights = weights
        self._optimization = optimization
        self._loss_function = loss_function
        self._transport = transport
        self._recorder = recorder
        self._received: dict[tuple[Channel, int], Message] = {}
        self._to_send: dict[tuple[Channel, int], Message] = {}
        self._awaits_gradient: set[int] = set()
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._handlers: dict[OpKind, Callable[[Op], None]] = {
            OpKind.RECV_ACTIVATION: self._receive_activation,
            OpKind.FORWARD: self._forward,
            OpKind.SEND_ACTIVATION: self._send_activation,
            OpKind.RECV_GRADIENT: self._receive_gradient,
            OpKind.BACKWARD: self._backward,
            OpKind.SEND_GRADIENT: self._send_gradient,
            OpKind.UPDATE: self._update,
        }

    def run(self, ops: Iterable[Op]) -> None:
        """Carry out ``ops`` in order. An error keeps its type and says where it happened."""
        clock = time.monotonic_ns
        for op in ops:
            start_ns = clock()
            try:
                self._handlers[op.kind](op)
            except Exception as error:
                error.add_note(
                    f"on stage {self.index}, in {op.kind.name} of microbatch {op.microbatch} "
                    f"(batch {op.batch}, weight version {op.version}); "
                    f"the last op that ended here: {self._recorder.last_op or 'none'}"
                )
                raise
            self._recorder.record(op, start_ns, clock())

    def _receive_activation(self, op: Op) -> None:
        message = self._transport.receive(self.index - 1, Channel.ACTIVATION)
        self._received[Channel.ACTIVATION, op.microbatch] = message

    def _forward(self, op: Op) -> None:
        batch = self.batches[op.batch]
        place = op.microbatch % len(batch.sizes)
        value: Value | Message
        if batch.inputs is not None:
            value = batch.inputs[place]
        else:
            value = self._received.pop((Channel.ACTIVATION, op.microbatch))
        self._weights.install(op.version)
        output = self._stage.forward(
            op.microbatch,
            batch=batch.header.batch,
            place=place,
            value=value,
            then=(lambda output: self._loss(batch, place, output)) if self.is_last_stage else None,
        )
        if self.is_last_stage:
            if place == len(batch.sizes) - 1:
                batch.end_forwards()
            return
        message = Message.of(output)
        self._to_send[Channel.ACTIVATION, op.microbatch] = message
        if message.wants_gradient:
            self._awaits_gradient.add(op.microbatch)
            self._transport.expect(self.index + 1, Channel.GRADIENT, batch.key(place))

    def _loss(self, batch: Batch, place: int, output: Value) -> Tensor:
        """The loss of one microbatch as its backward starts from it: scaled by its share of what
        the update takes. Sums are left as they are, since their weight is known only when the
        batch's last forward is over: the update divides by it."""
        assert batch.targets is not None, "the last stage has targets"
        result = self._loss_function(output, batch.targets[place])
        loss, weight = result if isinstance(result, tuple) else (result, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn gave {shape}; it must give a scalar tensor: the mean over the "
                "microbatch, or (sum, weight)"
            )
        if weight is not None:
            batch.add_sum(loss.detach(), float(weight))
            return loss / weight if self.microbatches_per_update == 1 else loss
        batch.add_mean(loss.detach(), place)
        return loss if self.microbatches_per_update == 1 else loss * batch.share(place)

    def _send_activation(self, op: Op) -> None:
        self._send(op, self.index + 1, Channel.ACTIVATION)

    def _receive_gradient(self, op: Op) -> None:
        if op.microbatch in self._awaits_gradient:
            message = self._transport.receive(self.index + 1, Channel.GRADIENT)
            self._received[Channel.GRADIENT, op.microbatch] = message

    def _backward(self, op: Op) -> None:
        group = op.microbatch // self.microbatches_per_update
        if group not in self._gradients:
            self._gradients[group] = [None] * len(self._weights.names)
        gradients: tuple[Tensor | None, ...] | None = None if self.is_last_stage else ()
        if op.microbatch in self._awaits_gradient:
            self._awaits_gradient.remove(op.microbatch)
            gradients = self._received.pop((Channel.GRADIENT, op.microbatch)).tensors
        with self._weights.accumulate(op.version, self._gradients[group]):
            input_gradients = self._stage.backward(op.microbatch, gradients)
        if input_gradients:
            self._to_send[Channel.GRADIENT, op.microbatch] = Message.of(input_gradients)

    def _send_gradient(self, op: Op) -> None:
        if (Channel.GRADIENT, op.microbatch) in self._to_send:
            self._send(op, self.index - 1, Channel.GRADIENT)

    def _send(self, op: Op, peer: int, channel: Channel) -> None:
        batch = self.batches[op.batch]
        key = batch.key(op.microbatch % len(batch.sizes))
        self._transport.send(peer, channel, key, self._to_send.pop((channel, op.microbatch)))

    def _update(self, op: Op) -> None:
        batch = self.batches[op.batch]
        gradients = self._gradients.pop(op.microbatch // self.microbatches_per_update)
        divisor = 1.0 if self.microbatches_per_update == 1 else batch.divisor()
        if divisor != 1.0:
            torch._foreach_div_([g for g in gradients if g is not None], divisor)
        self._weights.update(gradients, self._optimization.step)
        if (op.microbatch + 1) % len(batch.sizes) == 0:
            self._optimization.end_batch()
            del self.batches[op.batch]
