"""What a batch's time is made of, rank by rank: computing, and idle for a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from twobw.core.idle import Reason, idle_gaps
from twobw.core.timeline import Timeline

_ODD = 1.5  # times the median: a batch as long as that was interrupted, by an evaluation, say


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The mean batch of a timeline.

    Attributes:
        period_ns: median time of a batch.
        busy: by rank, the part of a batch's time in forwards, backwards and updates.
        idle: by rank, the part that it is idle for each reason; with ``busy`` these add up to 1.
    """

    period_ns: float
    busy: dict[int, float]
    idle: dict[int, dict[Reason, float]]

    def of_ranks(self, ranks: Sequence[int]) -> dict[str, float]:
        """Mean parts over some ranks, by ``"work"`` and the reasons' names."""
        parts = {"work": sum(self.busy[rank] for rank in ranks) / len(ranks)}
        for reason in Reason:
            parts[reason.value] = sum(self.idle[rank][reason] for rank in ranks) / len(ranks)
        return parts


def break_down(timeline: Timeline) -> Breakdown | None:
    """Of the batches between the first and the last of a timeline, which fill and drain the
    pipeline or are there in part only; those that took much longer than the others are left out.
    None where none is left.
    """
    ends = list(timeline.batch_ends_ns().values())
    windows = list(pairwise(ends[1:-1]))
    if not windows:
        return None
    period_ns = median(end - start for start, end in windows)
    windows = [(start, end) for start, end in windows if end - start <= _ODD * period_ns]
    total_ns = sum(end - start for start, end in windows)
    idle = {rank: dict.fromkeys(Reason, 0.0) for rank in timeline.ranks}
    for gap in idle_gaps(timeline):
        inside_ns = sum(
            max(min(gap.end_ns, end) - max(gap.start_ns, start), 0) for start, end in windows
        )
        idle[gap.rank][gap.reason] += inside_ns / total_ns
    busy = {rank: 1 - sum(parts.values()) for rank, parts in idle.items()}
    return Breakdown(period_ns, busy, idle)
