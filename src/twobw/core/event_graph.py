"""Who waits for whom, and how long: a lowered schedule with its costs as a graph of events.

When each event ends is a longest path in the graph. A finite schedule and one batch of an endless
one are the same graph, but that in the endless one some waits are for an event of an earlier
batch; then the longest path repeats itself with a period, that of the graph's slowest cycle
(Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twobw.core.costs import PipelineCost
from twobw.core.ops import Op, OpKind
from twobw.core.replay import Event, awaited, replay
from twobw.core.timeline import COMPUTE_LANE, Span

ORIGIN = -1
"""The event at time 0; in a list of times it stands behind the others, as the next does."""

NOTHING = -2
"""What an event waits for that waits for less than two."""

_KIND = {kind: number for number, kind in enumerate(OpKind)}
_SENT = {OpKind.RECV_ACTIVATION: OpKind.SEND_ACTIVATION, OpKind.RECV_GRADIENT: OpKind.SEND_GRADIENT}


class NeverEndsError(ValueError):
    """The programs wait for each other for ever."""


@dataclass(slots=True)
class Waits:
    """One thing that each event waits for, in columns by event.

    Attributes:
        other: the event that is waited for.
        ns: the least time from its end to that of the event that waits.
        batches: how many batches earlier it is, in an endless schedule.
    """

    other: list[int] = field(default_factory=list)
    ns: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def add(self, other: int, ns: int, batches: int = 0) -> None:
        """The next event's."""
        self.other.append(other)
        self.ns.append(ns)
        self.batches.append(batches)

    def put(self, event: int, other: int, ns: int, batches: int = 0) -> None:
        """An event's, anew."""
        self.other[event], self.ns[event], self.batches[event] = other, ns, batches


class EventGraph:
    """The events of lowered programs.

    Every op is an event, which ends when the op does, and waits for at most two others. Further
    events are the ends of reductions that stages make together.

    Args:
        programs: of all ranks.
        rank_of_stage: which rank owns each stage.
        cost: of everything.
        num_microbatches: of a batch.
        repeats: whether the programs are one batch of endless ones.

    Attributes:
        thread: what each event waits for of its own rank's thread.
        beside: what else: the lane that it runs on, a message, a reduction.

    Raises:
        NeverEndsError: some op can never run.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Op]],
        rank_of_stage: Sequence[int],
        cost: PipelineCost,
        num_microbatches: int,
        *,
        repeats: bool = False,
    ) -> None:
        self.thread, self.beside = Waits(), Waits()
        self._cost = cost
        self._ranks = rank_of_stage
        self._num_microbatches = num_microbatches
        self._repeats = repeats
        self._num_places = num_microbatches
        if not repeats:
            self._num_places = 1 + max((op.microbatch for p in programs for op in p), default=0)
        self._durations = _durations(cost)
        self._ops: list[Op] = []
        self._op_ranks: list[int] = []
        self._number: dict[int, int] = {}  # of each op's event
        self._batch: dict[int, int] = {}  # of each op, in an endless schedule
        self._threads: dict[int, tuple[int, int]] = {}  # the last event, and the time since
        self._lanes: dict[tuple[int, int], int] = {}
        self._thread_starts: list[tuple[int, int]] = []  # events, each with its rank
        self._lane_starts: list[tuple[int, tuple[int, int]]] = []
        self._begun: set[tuple[int, int]] = set()
        self._later: list[tuple[int, int, int, int]] = []
        self._reduced: dict[int, int] = {}  # a reduction's event -> that of its end
        self._build(programs)

    def __len__(self) -> int:
        return len(self.thread.other)

    def spans(self, ends: Sequence[int], cycle: Cycle | None = None) -> list[Span]:
        """The ops' spans.

        Args:
            ends: when events end; in units of ``1 / cycle.num_batches`` ns if there is a cycle.
            cycle: the period; what an op waits for may have ended in the one before.
        """
        unit, total_ns = (cycle.num_batches, cycle.total_ns) if cycle else (1, 0)
        found = []
        for event, op in enumerate(self._ops):
            start, end = ends[event] - unit * self._duration(op), ends[event]
            if op.kind.is_receive:  # it may have been posted long before
                waits = self.thread
                start = ends[waits.other[event]] + unit * waits.ns[event]
                start -= total_ns * waits.batches[event]
            elif op.kind is OpKind.REDUCE:
                end = ends[self._reduced.get(event, event)]
            rank = self._op_ranks[event]
            found.append(Span(op, rank, self._lane(op), start // unit, end // unit))
        return found

    def slowest_rank(self) -> Cycle:
        """The slowest of the cycles that are one rank's thread alone, in an endless schedule."""
        return max(map(self._thread_cycle, self._threads), key=lambda cycle: cycle.total_ns)

    def _build(self, programs: Sequence[Sequence[Op]]) -> None:
        if self._repeats:
            self._batch = {
                self._key(op): op.microbatch // self._num_microbatches
                for program in programs
                for op in program
            }
        for rank, index in replay(programs, self._awaited_now):
            self._add(rank, programs[rank][index])
        missing = sum(map(len, programs)) - len(self._ops)
        if missing:
            raise NeverEndsError(f"{missing} ops wait for ever")
        self._add_shared_reductions()
        for event, key, ns, batches in self._later:
            self.beside.put(event, self._end_of(self._number[key]), ns, batches)
        if self._repeats:
            self._close()

    def _close(self) -> None:
        """Let what opens a thread or lane wait for the last there, a batch earlier."""
        for event, rank in self._thread_starts:
            last, moved_ns = self._threads[rank]
            self.thread.put(event, last, moved_ns + self.thread.ns[event], 1)
        for event, lane in self._lane_starts:
            last = self._end_of(self._lanes[lane])
            self.beside.put(event, last, self.beside.ns[event], 1)

    def _end_of(self, event: int) -> int:
        return self._reduced.get(event, event)

    def _key(self, op: Op) -> int:
        return self._key_of(op.kind, op.stage, op.microbatch)

    def _key_of(self, kind: OpKind, stage: int, microbatch: int) -> int:
        place = microbatch % self._num_places
        return (_KIND[kind] * len(self._ranks) + stage) * self._num_places + place

    def _batches_before(self, op: Op, key: int) -> int:
        """How many batches before that of ``op`` its rank comes to the op of a key."""
        return self._batch[key] - op.microbatch // self._num_microbatches if self._repeats else 0

    def _awaited_now(self, op: Op) -> Event | None:
        """What ``op`` waits for within the batch."""
        source = awaited(op, self._ranks)
        is_earlier = source is not None and self._batches_before(op, self._key_of(*source))
        return None if is_earlier else source

    def _add(self, rank: int, op: Op) -> None:
        event = len(self._ops)
        self._ops.append(op)
        self._op_ranks.append(rank)
        self._number[self._key(op)] = event
        last, moved_ns = self._threads.get(rank, (ORIGIN, 0))
        moved_ns += self._begins_ns(rank, op)
        if op.kind in (OpKind.SEND_ACTIVATION, OpKind.SEND_GRADIENT):
            moved_ns += self._cost.overhead.message_ns
        duration_ns = self._duration(op)
        self.thread.add(last, moved_ns + duration_ns)
        self.beside.add(NOTHING, 0)
        if last == ORIGIN:
            self._thread_starts.append((event, rank))
        self._threads[rank] = (event, 0)
        match op.kind:
            case OpKind.SEND_ACTIVATION | OpKind.SEND_GRADIENT:
                self._take_lane((rank, self._peer(op)), event, duration_ns)
                self._threads[rank] = (last, moved_ns)
            case OpKind.REDUCE:
                self._take_lane((rank, rank), event, duration_ns)
                self._threads[rank] = (last, moved_ns)
            case OpKind.RECV_ACTIVATION | OpKind.RECV_GRADIENT:
                self._wait_for_message(op, event)
                self._threads[rank] = (event, self._cost.overhead.message_ns)
            case OpKind.UPDATE:
                key = self._key_of(OpKind.REDUCE, op.stage, op.microbatch)
                if key in self._number or key in self._batch:
                    self._later.append((event, key, duration_ns, self._batches_before(op, key)))

    def _begins_ns(self, rank: int, op: Op) -> int:
        """The overhead of beginning a batch, which comes before its first forward is awaited."""
        is_first = op.kind in (OpKind.RECV_ACTIVATION, OpKind.FORWARD)
        if (
            not is_first
            or op.microbatch % self._num_microbatches
            or (rank, op.batch) in self._begun
        ):
            return 0
        self._begun.add((rank, op.batch))
        return self._cost.overhead.batch_ns

    def _take_lane(self, lane: tuple[int, int], event: int, duration_ns: int) -> None:
        """What runs beside compute runs after what ran there before."""
        last = self._lanes.get(lane, ORIGIN)
        self.beside.put(event, last, duration_ns)
        if last == ORIGIN:
            self._lane_starts.append((event, lane))
        self._lanes[lane] = event

    def _wait_for_message(self, op: Op, event: int) -> None:
        sender = op.stage + (-1 if op.kind is OpKind.RECV_ACTIVATION else 1)
        key = self._key_of(_SENT[op.kind], sender, op.microbatch)
        latency_ns = self._cost.links[min(sender, op.stage)].latency_ns
        self._later.append((event, key, latency_ns, self._batches_before(op, key)))

    def _add_shared_reductions(self) -> None:
        """The ends of reductions that stages make together: each waits for all the others."""
        reduces = [event for event, op in enumerate(self._ops) if op.kind is OpKind.REDUCE]
        for reduction in self._cost.reductions:
            before = dict(self._reduced)
            for event in reduces:
                op = self._ops[event]
                if op.stage not in reduction.stages:
                    continue
                self._reduced[event] = before.get(event, event)
                for stage in reduction.stages:
                    key = self._key_of(op.kind, stage, op.microbatch)
                    other = before.get(self._number[key], self._number[key])
                    self._join(event, other, self._batches_before(op, key))
                self.thread.ns[-1] += reduction.duration_ns
                self.beside.ns[-1] += reduction.duration_ns
        for event in reduces:  # the next of a rank begins when the one before has ended
            self.beside.other[event] = self._end_of(self.beside.other[event])

    def _join(self, event: int, other: int, batches: int) -> None:
        """Let the end of a reduction wait for another one, too."""
        self.thread.add(self._reduced[event], 0)
        self.beside.add(other, 0, batches)
        self._reduced[event] = len(self) - 1

    def _duration(self, op: Op) -> int:
        """Of what an op does on its lane; a receive only waits."""
        durations = self._durations.get(op.kind)
        return durations[op.stage] if durations else 0

    def _peer(self, op: Op) -> int:
        """The rank at the other end of a transfer."""
        to_next = op.kind in (OpKind.SEND_ACTIVATION, OpKind.RECV_GRADIENT)
        return self._ranks[op.stage + 1 if to_next else op.stage - 1]

    def _lane(self, op: Op) -> str:
        if op.kind.is_transfer:
            return f"{'recv' if op.kind.is_receive else 'send'} {self._peer(op)}"
        return "reduce" if op.kind is OpKind.REDUCE else COMPUTE_LANE

    def _thread_cycle(self, rank: int) -> Cycle:
        last = event = self._threads[rank][0]
        total_ns = num_batches = 0
        while num_batches == 0:
            total_ns += self.thread.ns[event]
            num_batches = self.thread.batches[event]
            event = self.thread.other[event]
        return Cycle(total_ns, num_batches, last)


@dataclass(frozen=True, slots=True)
class Cycle:
    """Events that wait for each other in a ring, each time some batches later.

    Attributes:
        total_ns: around the ring.
        num_batches: likewise.
        event: one of them.
    """

    total_ns: int
    num_batches: int
    event: int


def _durations(cost: PipelineCost) -> dict[OpKind, list[int]]:
    """By kind and stage."""
    sent = [
        link.occupied_ns(stage.output_bytes)
        for link, stage in zip(cost.links, cost.stages[:-1], strict=True)
    ]
    op_ns = cost.overhead.op_ns
    return {
        OpKind.FORWARD: [stage.forward_ns + op_ns for stage in cost.stages],
        OpKind.BACKWARD: [stage.backward_ns + op_ns for stage in cost.stages],
        OpKind.UPDATE: [stage.update_ns for stage in cost.stages],
        OpKind.REDUCE: [stage.reduce_ns for stage in cost.stages],
        OpKind.SEND_ACTIVATION: [*sent, 0],
        OpKind.SEND_GRADIENT: [0, *sent],
    }
