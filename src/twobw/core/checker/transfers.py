"""Rules about what passes between stages, and whether all programs together end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest

from twobw.core.checker.violation import Violation
from twobw.core.lowering import is_lowered, lower_ops, stage_ranks
from twobw.core.ops import Op, OpKind
from twobw.core.replay import Event, awaited, event, replay
from twobw.core.schedule import Schedule

_SENT_BY = {OpKind.SEND_ACTIVATION: OpKind.FORWARD, OpKind.SEND_GRADIENT: OpKind.BACKWARD}
_RECEIVED_BY = {
    OpKind.SEND_ACTIVATION: OpKind.RECV_ACTIVATION,
    OpKind.SEND_GRADIENT: OpKind.RECV_GRADIENT,
}


def transfer_violations(schedule: Schedule) -> Iterator[Violation]:
    """All violations of the rules in this file. Each stage must have one owner."""
    lowered = _Lowered(schedule)
    if is_lowered(schedule):
        yield from _transfer(lowered)
    yield from _edge(lowered)
    yield from _deadlock(lowered)


class _Lowered:
    """The lowered programs of a schedule, each op with the index of the given op it is from."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ranks = stage_ranks(schedule)
        given = is_lowered(schedule)
        self.programs = [
            [(i, low) for i, op in enumerate(program) for low in ((op,) if given else self.of(op))]
            for program in schedule.programs
        ]

    def of(self, op: Op) -> list[Op]:
        """A compute op between its receive and its send, where it has them."""
        return list(lower_ops((op,), self.ranks, microbatches_per_update=1))

    def fault(self, rank: int, index: int, rule: str, message: str) -> Violation:
        return Violation(rank, index, self.schedule.programs[rank][index], rule, message)


def _transfer(lowered: _Lowered) -> Iterator[Violation]:
    for rank, program in enumerate(lowered.programs):
        fault = partial(lowered.fault, rank, rule="transfer")
        places: dict[Op, int] = {}
        for index, op in program:
            if op in places and op.kind.is_transfer:
                yield fault(index, message="it stands here a second time")
            places.setdefault(op, index)
        unneeded = {op for op in places if op.kind.is_transfer}
        for index, op in program:
            if op.kind not in _SENT_BY.values():
                continue
            own = lowered.of(op)
            unneeded.difference_update(own)
            receives, sends = own[: own.index(op)], own[own.index(op) + 1 :]
            for receive in receives:
                if places.get(receive, index) >= index:
                    yield fault(index, message=f"its receive {receive} does not stand before it")
            for send in sends:
                if places.get(send, index) <= index:
                    yield fault(index, message=f"its send {send} does not stand after it")
        for op in unneeded:
            yield fault(places[op], message="no forward or backward here needs it")


def _edge(lowered: _Lowered) -> Iterator[Violation]:
    ends: dict[tuple[OpKind, int], list[tuple[int, int]]] = {}
    for program in lowered.programs:
        for index, op in program:
            ends.setdefault((op.kind, op.stage), []).append((op.microbatch, index))
    for stage in range(lowered.schedule.num_stages - 1):
        yield from _one_edge(lowered, ends, OpKind.SEND_ACTIVATION, stage, stage + 1)
        yield from _one_edge(lowered, ends, OpKind.SEND_GRADIENT, stage + 1, stage)


def _one_edge(
    lowered: _Lowered,
    ends: dict[tuple[OpKind, int], list[tuple[int, int]]],
    kind: OpKind,
    source: int,
    target: int,
) -> Iterator[Violation]:
    """The first difference between what one stage sends and what its neighbour receives."""
    sends, receives = ends.get((kind, source), []), ends.get((_RECEIVED_BY[kind], target), [])
    for sent, received in zip_longest(sends, receives):
        if received is None:
            message = f"stage {target} does not receive it"
            yield lowered.fault(lowered.ranks[source], sent[1], "edge", message)
            return
        if sent is None or sent[0] != received[0]:
            passed = "activation" if kind is OpKind.SEND_ACTIVATION else "gradient"
            what = "nothing more" if sent is None else f"that of {sent[0]}"
            message = (
                f"stage {target} receives the {passed} of microbatch {received[0]} "
                f"where stage {source} sends {what}"
            )
            yield lowered.fault(lowered.ranks[target], received[1], "edge", message)
            return


def _deadlock(lowered: _Lowered) -> Iterator[Violation]:
    programs = [[op for _, op in program] for program in lowered.programs]
    awaits = partial(awaited, rank_of_stage=lowered.ranks)
    reached = [0] * len(programs)
    for rank, position in replay(programs, awaits):
        reached[rank] = position + 1
    stuck = {rank: at for rank, at in enumerate(reached) if at < len(programs[rank])}
    to_come = {rank: {event(op) for op in programs[rank][at:]} for rank, at in stuck.items()}
    for rank, at in stuck.items():
        index, op = lowered.programs[rank][at]
        needs = awaits(op)
        if needs is not None:
            kind, stage, microbatch = needs
            text = f"it needs {_SENT_BY.get(kind, kind).value}{microbatch} of stage {stage}, "
            text += _why_never(lowered, needs, rank, stuck, to_come)
            yield lowered.fault(rank, index, "deadlock", text)


def _why_never(
    lowered: _Lowered,
    needs: Event,
    rank: int,
    stuck: dict[int, int],
    to_come: dict[int, set[Event]],
) -> str:
    stage = needs[1]
    peer = lowered.ranks[stage] if 0 <= stage < len(lowered.ranks) else None
    if peer is None or needs not in to_come.get(peer, ()):
        return "which comes nowhere"
    if peer == rank:
        return "which comes later on this rank"
    index, _ = lowered.programs[peer][stuck[peer]]
    op = lowered.schedule.programs[peer][index]
    return f"but rank {peer} waits at {op} for ever"
