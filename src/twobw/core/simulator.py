"""Play a schedule against costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from twobw.core.costs import LinkCost, StageCost
from twobw.core.lowering import is_lowered, lower, stage_ranks
from twobw.core.ops import Op, OpKind
from twobw.core.replay import Event, awaited, event, replay
from twobw.core.schedule import Schedule
from twobw.core.timeline import COMPUTE_LANE, Span, Timeline


def simulate(
    schedule: Schedule, stages: StageCost | Sequence[StageCost], link: LinkCost | None = None
) -> Timeline:
    """When each op of the schedule runs.

    A rank runs its program in order on its compute lane. Sends do not block: a transfer starts
    when its op has run and the transfers before it on the same directed link have ended. A
    receive blocks until its transfer has ended. Reductions take no time yet.

    Args:
        schedule: lowered, or compute ops alone (then it is lowered here).
        stages: the cost of every stage, or one for each.
        link: the cost of every directed link; None is a link that takes no time.

    Raises:
        ValueError: the number of costs is not that of the stages, or the programs never end.
    """
    costs = [stages] * schedule.num_stages if isinstance(stages, StageCost) else list(stages)
    if len(costs) != schedule.num_stages:
        raise ValueError(
            f"stages has {len(costs)} costs for {schedule.num_stages} stages; "
            "give one StageCost for all, or one for each"
        )
    lowered = schedule if is_lowered(schedule) else lower(schedule)
    ranks = stage_ranks(lowered)
    clock = _Clock(costs, link or LinkCost(), ranks)
    spans = [
        clock.run(rank, lowered.programs[rank][index])
        for rank, index in replay(lowered.programs, partial(awaited, rank_of_stage=ranks))
    ]
    total = sum(len(program) for program in lowered.programs)
    if len(spans) < total:
        raise ValueError(
            f"schedule {schedule.name!r} never ends: {total - len(spans)} ops wait for ever; "
            "check(schedule) says which, and on whom"
        )
    spans.sort(key=lambda span: (span.start_ns, span.rank))
    return Timeline(tuple(spans), "simulated")


class _Clock:
    """When each rank, link and result is free. Ops come in an order in which they can run."""

    def __init__(self, costs: list[StageCost], link: LinkCost, rank_of_stage: Sequence[int]):
        self._costs = costs
        self._link = link
        self._rank_of_stage = rank_of_stage
        self._rank_free: dict[int, int] = {}
        self._link_free: dict[tuple[int, int], int] = {}
        self._ends: dict[Event, int] = {}

    def run(self, rank: int, op: Op) -> Span:
        now = self._rank_free.get(rank, 0)
        match op.kind:
            case OpKind.FORWARD | OpKind.BACKWARD | OpKind.UPDATE:
                # What it takes from a neighbouring stage of its own rank ran before it there.
                span = Span(op, rank, COMPUTE_LANE, now, now + self._duration(op))
                self._rank_free[rank] = span.end_ns
            case OpKind.SEND_ACTIVATION | OpKind.SEND_GRADIENT:
                peer = self._peer(op)
                start = max(now, self._link_free.get((rank, peer), 0))
                span = Span(op, rank, f"send {peer}", start, start + self._link.transfer_ns)
                self._link_free[rank, peer] = span.end_ns
            case OpKind.RECV_ACTIVATION | OpKind.RECV_GRADIENT:
                sent = awaited(op, self._rank_of_stage)
                arrival = self._ends[sent] if sent is not None else now
                span = Span(op, rank, f"recv {self._peer(op)}", now, max(now, arrival))
                self._rank_free[rank] = span.end_ns
            case OpKind.REDUCE:
                span = Span(op, rank, "reduce", now, now)
        self._ends[event(op)] = span.end_ns
        return span

    def _duration(self, op: Op) -> int:
        cost = self._costs[op.stage]
        if op.kind is OpKind.FORWARD:
            return cost.forward_ns
        return cost.backward_ns if op.kind is OpKind.BACKWARD else cost.update_ns

    def _peer(self, op: Op) -> int:
        """The rank at the other end of a transfer."""
        to_next = op.kind in (OpKind.SEND_ACTIVATION, OpKind.RECV_GRADIENT)
        return self._rank_of_stage[op.stage + 1 if to_next else op.stage - 1]
