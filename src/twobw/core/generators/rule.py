"""A schedule is two rules a stage: how many microbatches may be in flight, and which version each
runs on. The order of ops follows: take the next forward when the rules allow, else the next
backward (Narayanan et al., 2021, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twobw.core.ops import Op, OpKind


@dataclass(frozen=True, slots=True)
class StageRule:
    """What one stage may do.

    Attributes:
        max_in_flight: the most microbatches between their forward and backward.
        num_versions: weight buffers; version ``v`` lives in slot ``v % num_versions``.
        microbatches_per_update: backwards that each update takes.
        version: microbatch -> the version that its forward and backward run on. Versions never
            fall from one microbatch to the next. A forward waits for its version to be made.
        defer_update: whether an update waits until a forward needs its version (so that what
            must be reduced has time to arrive), rather than following its last backward.
        backward_on_newest: whether backwards run on the newest version whatever their forward
            used, so that no other is kept. Forwards then run on the newest as well, which is
            ``version`` or, where the pipeline was drained, a later one. Does not go with
            ``defer_update``.
    """

    max_in_flight: int
    num_versions: int
    microbatches_per_update: int
    version: Callable[[int], int]
    defer_update: bool = False
    backward_on_newest: bool = False

    def backward_version(self, microbatch: int) -> int:
        """The version that a microbatch's backward runs on."""
        if self.backward_on_newest:
            return microbatch // self.microbatches_per_update
        return self.version(microbatch)


class StageProgram:
    """One stage's ops, streamed batch by batch; never materialised.

    ``begin_batch`` for batches 0, 1, ... then ``drain`` yields the whole program; ``drain`` may
    also stand between batches (for a checkpoint, an evaluation): it finishes what is in flight
    and leaves the version rule as it was (forwards that must take the newest version find a newer
    one: `StageRule.backward_on_newest`).
    """

    def __init__(
        self, stage: int, num_microbatches: int, rule: StageRule, first_batch: int = 0
    ) -> None:
        self.stage = stage
        self.num_microbatches = num_microbatches
        self.rule = rule
        self._forwards = first_batch * num_microbatches  # forwards done = next microbatch
        self._backwards = self._forwards
        self._updates = self._forwards // rule.microbatches_per_update

    def begin_batch(self) -> Iterator[Op]:
        """Ops up to and including the last forward of the next batch."""
        end = self._forwards + self.num_microbatches
        while self._forwards < end:
            yield self._next(end)

    def drain(self) -> Iterator[Op]:
        """Ops that finish every batch begun, its update included."""
        while self._backwards < self._forwards or self._is_update_pending():
            yield self._next(self._forwards)

    def _next(self, end: int) -> Op:
        """The next op, when forwards before microbatch ``end`` may be taken."""
        if self._is_update_pending() and not self.rule.defer_update:
            return self._update()
        if self._forwards < end:
            needed = self.rule.version(self._forwards)
            is_made = needed * self.rule.microbatches_per_update <= self._backwards
            if is_made and self._forwards - self._backwards < self.rule.max_in_flight:
                return self._update() if self._updates < needed else self._forward()
        return self._backward() if self._backwards < self._forwards else self._update()

    def _is_update_pending(self) -> bool:
        return (self._updates + 1) * self.rule.microbatches_per_update <= self._backwards

    def _forward(self) -> Op:
        microbatch, self._forwards = self._forwards, self._forwards + 1
        version = self.rule.version(microbatch)
        if self.rule.backward_on_newest:
            version = self._updates
        return self._op(OpKind.FORWARD, microbatch, version)

    def _backward(self) -> Op:
        microbatch, self._backwards = self._backwards, self._backwards + 1
        return self._op(OpKind.BACKWARD, microbatch, self.rule.backward_version(microbatch))

    def _update(self) -> Op:
        self._updates += 1
        microbatch = self._updates * self.rule.microbatches_per_update - 1
        return self._op(OpKind.UPDATE, microbatch, self._updates)

    def _op(self, kind: OpKind, microbatch: int, version: int) -> Op:
        return Op(kind, self.stage, microbatch, microbatch // self.num_microbatches, version)
