"""When the events of a graph end: its longest paths."""

from __future__ import annotations

from collections.abc import Sequence

from twobw.core.event_graph import ORIGIN, Cycle, EventGraph, NeverEndsError, Waits

_NEVER = -(10**30)


def settle(graph: EventGraph) -> list[int]:
    """When every event of a finite schedule ends, in ns, as early as it can.

    Raises:
        NeverEndsError: events wait for each other.
    """
    ends = _longest_paths(graph, None)
    if isinstance(ends, Cycle):
        raise NeverEndsError("updates and reductions wait for each other for ever")
    return ends


def settle_endless(graph: EventGraph) -> tuple[list[int], Cycle]:
    """The slowest cycle of an endless schedule, and when every event ends in the batch where one
    of the cycle's ends at 0: in units of ``1 / cycle.num_batches`` ns, so that they are whole
    numbers.

    Raises:
        NeverEndsError: events wait for each other within a batch.
    """
    cycle = graph.slowest_rank()
    while isinstance(found := _longest_paths(graph, cycle), Cycle):
        if found.num_batches <= 0:
            raise NeverEndsError("updates and reductions wait for each other for ever")
        cycle = found
    return found, cycle


def _longest_paths(graph: EventGraph, cycle: Cycle | None) -> list[int] | Cycle:
    """From the origin, or from an event of the cycle, with all times less what the cycle says
    that batches take: the length of every event's longest path (Bellman and Ford); or a cycle
    that is slower, around which they would grow for ever."""
    start = cycle.event if cycle else ORIGIN
    waits = list(
        zip(
            graph.thread.other,
            _reduced(graph.thread, cycle),
            graph.beside.other,
            _reduced(graph.beside, cycle),
            strict=True,
        )
    )
    ends = [_NEVER] * (len(graph) + 2)
    ends[start] = 0
    reasons = [ORIGIN] * len(graph)  # the event that each has waited for
    changed = 0
    while changed != ORIGIN:
        changed = ORIGIN
        for event, (first, first_ns, second, second_ns) in enumerate(waits):
            end, other = ends[first] + first_ns, ends[second] + second_ns
            if other > end:
                end, first = other, second
            if end > ends[event]:
                ends[event], reasons[event], changed = end, first, event
        slower = _find_cycle(graph, reasons, changed)
        if slower is not None:
            return slower
    return ends


def _reduced(waits: Waits, cycle: Cycle | None) -> list[int]:
    """Their times, in units of ``1 / cycle.num_batches`` ns, less the cycle's time a batch."""
    if cycle is None:
        return waits.ns
    unit, total_ns = cycle.num_batches, cycle.total_ns
    return [
        unit * ns - total_ns * batches for ns, batches in zip(waits.ns, waits.batches, strict=True)
    ]


def _find_cycle(graph: EventGraph, reasons: Sequence[int], event: int) -> Cycle | None:
    """The ring of events that an event has waited for in the end, if it is one."""
    seen: set[int] = set()
    while event >= 0 and event not in seen:
        seen.add(event)
        event = reasons[event]
    if event < 0:
        return None
    first, total_ns, num_batches = event, 0, 0
    while True:
        waits = graph.thread if graph.thread.other[event] == reasons[event] else graph.beside
        total_ns += waits.ns[event]
        num_batches += waits.batches[event]
        event = reasons[event]
        if event == first:
            return Cycle(total_ns, num_batches, first)
