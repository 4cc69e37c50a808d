"""Play a schedule against costs."""

from __future__ import annotations

from collections.abc import Sequence

from twobw.core.costs import LinkCost, OverheadCost, PipelineCost, SharedReduction, StageCost
from twobw.core.event_graph import EventGraph, NeverEndsError
from twobw.core.longest_path import settle
from twobw.core.lowering import is_lowered, lower, stage_ranks
from twobw.core.schedule import Schedule
from twobw.core.timeline import Timeline


def simulate(
    schedule: Schedule,
    stages: StageCost | Sequence[StageCost],
    links: LinkCost | Sequence[LinkCost] | None = None,
    overhead: OverheadCost | None = None,
    reductions: Sequence[SharedReduction] = (),
) -> Timeline:
    """When each op of the schedule runs.

    A rank runs its program in order on its compute lane. Sends do not block: a transfer starts
    when its op has run and the transfers before it on the same directed link have ended. A
    receive blocks until its message has arrived. A reduction runs on a lane of its own, after
    the one before; the update that takes it blocks until it has ended.

    Args:
        schedule: lowered, or compute ops alone (then it is lowered here, with reductions if they
            take time).
        stages: the cost of every stage, or one for each.
        links: the cost of every link, or one for each, that between stages 0 and 1 first; None:
            they take no time.
        overhead: what ranks take besides; None: nothing.
        reductions: those that several stages make together, in their order.

    Raises:
        ValueError: costs do not fit the number of stages, or the programs never end.
    """
    cost = PipelineCost.of(schedule.num_stages, stages, links, overhead, reductions)
    return play(schedule, cost)


def play(schedule: Schedule, cost: PipelineCost) -> Timeline:
    """`simulate` with all costs in one.

    Raises:
        ValueError: the programs never end.
    """
    lowered = schedule if is_lowered(schedule) else lower(schedule, reduce=cost.reduces)
    try:
        graph = EventGraph(lowered.programs, stage_ranks(lowered), cost, schedule.num_microbatches)
        ends = settle(graph)
    except NeverEndsError as error:
        raise ValueError(
            f"schedule {schedule.name!r} never ends: {error}; "
            "check(schedule) says which, and on whom"
        ) from error
    spans = graph.spans(ends)
    spans.sort(key=lambda span: (span.start_ns, span.rank))
    return Timeline(tuple(spans), "simulated")
