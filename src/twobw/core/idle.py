"""Why a rank computes nothing: each idle gap of a timeline, its reason and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from statistics import mean

from twobw.core.dependencies import Dependencies
from twobw.core.ops import Op, OpKind
from twobw.core.timeline import COMPUTE_LANE, Span, Timeline


class Reason(Enum):
    """Why a rank was idle."""

    BUBBLE = "bubble"
    """The schedule leaves it nothing to do, even with equal stages and free links."""
    IMBALANCE = "imbalance"
    """It waits for a slower stage."""
    LINK = "link"
    """What it waits for is computed, and on its way."""
    REDUCTION = "reduction"
    """An update waits for gradients that ranks reduce together."""
    OVERHEAD = "overhead"
    """Nothing is missing: its own thread does something else."""


HELP = {
    Reason.BUBBLE: "more microbatches a batch, or a schedule that does not drain",
    Reason.IMBALANCE: "another split of the layers",
    Reason.LINK: "more in flight (extra_in_flight), or larger microbatches where latency counts",
    Reason.REDUCTION: "more microbatches a batch, or a later update (overlap, update_lag)",
    Reason.OVERHEAD: "larger microbatches",
}
"""What would help against each reason."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a rank's compute lane is empty, for one reason.

    Attributes:
        rank: that is idle.
        start_ns: on the timeline's clock.
        end_ns: likewise, after ``start_ns``.
        reason: why.
        before: the op that runs next; ``None`` at the end.
        waits_for: the op that is waited for, if another rank's.
        waits_on: the rank that runs it.
    """

    rank: int
    start_ns: int
    end_ns: int
    reason: Reason
    before: Op | None
    waits_for: Op | None = None
    waits_on: int | None = None

    @property
    def duration_ns(self) -> int:
        """End less start."""
        return self.end_ns - self.start_ns


def idle_gaps(timeline: Timeline) -> list[Gap]:
    """All gaps of all ranks, from the first start to the last end, by start. With the compute
    spans of its rank they fill the timeline.

    A gap before an op that takes something from another stage has up to three parts: until that
    is computed, until it has arrived, and the rest. The first is bubble as far as it would be
    there if all stages took equally long and nothing else any time, imbalance as far as it would
    be there with the stages as they are, and beyond that has the reason for which the other stage
    was itself late.
    """
    if not timeline.spans:
        return []
    return sorted(_Explainer(timeline).gaps(), key=lambda gap: (gap.start_ns, gap.rank))


def idle_ns(gaps: list[Gap], rank: int) -> dict[Reason, int]:
    """A rank's idle time by reason."""
    total = dict.fromkeys(Reason, 0)
    for gap in gaps:
        if gap.rank == rank:
            total[gap.reason] += gap.duration_ns
    return total


class _Explainer:
    """Goes through a timeline's compute spans in the order of time."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._dependencies = Dependencies(timeline)
        self._compute = sorted(
            (span for span in timeline.spans if span.lane == COMPUTE_LANE),
            key=lambda span: (span.start_ns, span.end_ns),
        )
        durations = {
            kind: round(mean(span.duration_ns for span in self._compute if span.op.kind is kind))
            for kind in {span.op.kind for span in self._compute}
        }
        self._if_equal = self._waits(lambda span: durations[span.op.kind])
        self._if_free = self._waits(lambda span: span.duration_ns)
        self._late: dict[int, Reason] = {}  # why each rank was late last

    def gaps(self) -> Iterator[Gap]:
        start = min(span.start_ns for span in self._timeline.spans)
        end = start + self._timeline.makespan_ns
        free = dict.fromkeys(self._timeline.ranks, start)
        for span in self._compute:
            for gap in self._gaps_before(span, free[span.rank]):
                if gap.reason not in (Reason.BUBBLE, Reason.IMBALANCE):
                    self._late[gap.rank] = gap.reason
                yield gap
            free[span.rank] = max(free[span.rank], span.end_ns)
        for rank, since in free.items():
            if since < end:
                yield Gap(rank, since, end, Reason.BUBBLE, None)

    def _gaps_before(self, span: Span, free: int) -> Iterator[Gap]:
        """The parts of the gap between ``free`` and a span."""
        for until, reason, cause in self._causes(span, free):
            until = min(until, span.start_ns)
            if until > free:
                op, rank = (cause.op, cause.rank) if cause else (None, None)
                yield Gap(span.rank, free, until, reason, span.op, op, rank)
                free = until

    def _causes(self, span: Span, free: int) -> Iterator[tuple[int, Reason, Span | None]]:
        """Until when a span waits, why, and for what, in the order of time."""
        reduction = self._dependencies.reduction(span) if span.op.kind is OpKind.UPDATE else None
        if reduction is not None:
            last = self._dependencies.last_to_reduce(reduction)
            yield reduction.end_ns, Reason.REDUCTION, None if last is reduction else last
        source = self._dependencies.source(span)
        if source is not None and source.rank != span.rank:
            computed = source.end_ns
            yield min(free + self._if_equal[span], computed), Reason.BUBBLE, source
            yield min(free + self._if_free[span], computed), Reason.IMBALANCE, source
            yield computed, self._late.get(source.rank, Reason.LINK), source
            receive = self._dependencies.receive(span)
            yield receive.end_ns if receive else span.start_ns, Reason.LINK, source
        yield span.start_ns, Reason.OVERHEAD, None

    def _waits(self, duration_ns: Callable[[Span], int]) -> dict[Span, int]:
        """How long each span would be waited for if nothing took time but computing, so long."""
        free: dict[int, int] = {}
        ends: dict[Span, int] = {}
        waits: dict[Span, int] = {}
        for span in self._compute:
            source = self._dependencies.source(span)
            now = free.get(span.rank, 0)
            start = max(now, ends.get(source, 0)) if source else now
            waits[span] = start - now
            free[span.rank] = ends[span] = start + duration_ns(span)
        return waits
