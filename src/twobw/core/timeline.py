"""`Timeline`: what ran when, predicted or measured, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from twobw.core.occupancy import in_flight
from twobw.core.ops import Op, OpKind

COMPUTE_LANE = "compute"


@dataclass(frozen=True, slots=True)
class Span:
    """One op's time.

    Attributes:
        op: what ran.
        rank: the rank that ran it.
        lane: ``"compute"``, or what it runs beside: in a simulation ``"send 1"`` (the link to
            rank 1), ``"recv 1"`` (waiting for rank 1) and ``"reduce"``, whose spans do not overlap.
        start_ns: start, on a clock that all spans of a timeline share.
        end_ns: end, at least ``start_ns``.
    """

    op: Op
    rank: int
    lane: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """End less start."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of a run, or of the last batches of one.

    Attributes:
        spans: in any order.
        source: whether they were simulated or measured.
    """

    spans: tuple[Span, ...]
    source: Literal["simulated", "measured"]

    @property
    def ranks(self) -> list[int]:
        """The ranks that have spans, ascending."""
        return sorted({span.rank for span in self.spans})

    @property
    def makespan_ns(self) -> int:
        """From the first start to the last end, over all ranks; 0 without spans."""
        if not self.spans:
            return 0
        first = min(span.start_ns for span in self.spans)
        return max(span.end_ns for span in self.spans) - first

    def spans_of(self, rank: int) -> list[Span]:
        """The spans of one rank by start, those of its compute lane in the order they ran."""
        return _by_start(span for span in self.spans if span.rank == rank)

    def busy_ns(self, rank: int) -> int:
        """Time in ``FORWARD``, ``BACKWARD`` and ``UPDATE``; waits excluded."""
        return sum(s.duration_ns for s in self.spans if s.rank == rank and s.op.kind.is_compute)

    def busy_fraction(self, rank: int) -> float:
        """Busy time over the makespan, between 0 and 1; 1 less this is the rank's bubble."""
        return self.busy_ns(rank) / self.makespan_ns if self.makespan_ns else 0.0

    def batch_ends_ns(self) -> dict[int, int]:
        """For each batch when its last backward ended, on whichever rank; differences of
        neighbours are the time a batch takes."""
        ends: dict[int, int] = {}
        for span in self.spans:
            if span.op.kind is OpKind.BACKWARD:
                ends[span.op.batch] = max(ends.get(span.op.batch, span.end_ns), span.end_ns)
        return dict(sorted(ends.items()))

    def peak_in_flight(self) -> dict[int, int]:
        """For each stage the most microbatches between their forward and backward. Those whose
        forward is older than the timeline count from its start."""
        stages: dict[int, list[Op]] = {}
        for span in _by_start(self.spans):
            stages.setdefault(span.op.stage, []).append(span.op)
        return {stage: _peak_in_flight(ops) for stage, ops in sorted(stages.items())}


def _by_start(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_ns, span.end_ns))


def _peak_in_flight(ops: list[Op]) -> int:
    forwards = {op.microbatch for op in ops if op.kind is OpKind.FORWARD}
    older = [
        Op(OpKind.FORWARD, op.stage, op.microbatch, op.batch, op.version)
        for op in ops
        if op.kind is OpKind.BACKWARD and op.microbatch not in forwards
    ]
    return max(in_flight(older + ops), default=0)
