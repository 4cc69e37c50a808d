"""The critical path of a timeline: the spans that, one waiting for the other, took all the time."""

from __future__ import annotations

from twobw.core.dependencies import Dependencies
from twobw.core.ops import OpKind
from twobw.core.timeline import Span, Timeline


def critical_path(timeline: Timeline) -> list[Span]:
    """From the first to the last span of the timeline, in order of time: before each stands the
    one that it has waited for last. Computing any of them faster would have ended the run sooner,
    if nothing else is as slow.

    Receives are no part of it, the sends that they wait for are.
    """
    ends = [span for span in timeline.spans if not span.op.kind.is_receive]
    if not ends:
        return []
    dependencies = Dependencies(timeline)
    path = [max(ends, key=lambda span: (span.end_ns, span.start_ns, -span.rank))]
    while (before := _waited_for(path[-1], dependencies)) is not None:
        path.append(before)
    return path[::-1]


def _waited_for(span: Span, dependencies: Dependencies) -> Span | None:
    """What ended last of all that a span needs; its own lane's last span where both end at once."""
    if span.op.kind is OpKind.REDUCE:
        last = dependencies.last_to_reduce(span)
        if last is not span:
            return last
    needs = [other for other in dependencies.all_of(span) if other.start_ns <= span.start_ns]
    return max(needs, key=lambda other: other.end_ns, default=None)
