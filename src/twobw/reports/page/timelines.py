"""What the page shows of timelines: predicted above measured, on one axis of time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from twobw.core.generators import generate, stage_rule
from twobw.core.idle import HELP, Reason, idle_gaps
from twobw.core.ops import OpKind
from twobw.core.simulator import play
from twobw.core.timeline import COMPUTE_LANE, Span, Timeline
from twobw.planner.plan import Plan

MOST_SPANS = 20_000
"""Of a timeline on a page; of a longer one the last batches are shown."""

_LEAD = 4  # batches played before those that are shown, so that the pipeline is full
_ALONE = 6  # batches of a plan without a run
_KINDS = list(OpKind)
_REASONS = list(Reason)


def timeline_section(plan: Plan | None, measured: Timeline | None) -> dict[str, Any] | None:
    """The panels of the timeline, predicted first; None where there is nothing to draw.

    Both begin with the same batch, and time 0 is the start of its first forward. Ops of the
    prediction have the numbers that they have in the run.
    """
    if measured is not None and not _forwards(measured):
        measured = None
    first, num_batches = 0, _ALONE
    if measured is not None:
        first, last = _shown_batches(measured)
        num_batches = last - first + 1
    panels = []
    if plan is not None and is_drawable(plan):
        panels.append(_panel("predicted", predicted_timeline(plan, first, num_batches), first))
    if measured is not None:
        panels.append(_panel("measured", measured, first))
    if not panels:
        return None
    return {
        "kinds": [kind.value for kind in _KINDS],
        "reasons": [reason.value for reason in _REASONS],
        "help": [HELP[reason] for reason in _REASONS],
        "first_batch": first,
        "num_batches": num_batches,
        "panels": panels,
    }


def is_drawable(plan: Plan) -> bool:
    """Whether a batch has not too many microbatches for a page."""
    return _spans_of_a_batch(plan) <= MOST_SPANS


def _spans_of_a_batch(plan: Plan) -> int:
    """At most: each microbatch has forward, backward and four ends of messages on a stage."""
    return 6 * plan.pp * plan.num_microbatches


def predicted_timeline(plan: Plan, first_batch: int, num_batches: int) -> Timeline:
    """The end of a run of a plan: from a little before ``first_batch`` on, so that the pipeline is
    full by then, for so many batches or as many as a page shows."""
    lead = min(first_batch, _LEAD)
    played = lead + min(num_batches, max(MOST_SPANS // _spans_of_a_batch(plan), 1))
    m, options = plan.num_microbatches, plan.options
    timeline = play(generate(plan.schedule, plan.pp, m, played, **options), plan.cost())
    updates = m // stage_rule(plan.schedule, 0, plan.pp, m, **options).microbatches_per_update
    return _renumbered(timeline, first_batch - lead, m, updates)


def batch_ns(timeline: Timeline) -> float | None:
    """The median time between the ends of neighbouring batches; None for fewer than two."""
    ends = list(timeline.batch_ends_ns().values())
    times = sorted(later - earlier for earlier, later in pairwise(ends))
    return float(times[len(times) // 2]) if times else None


def _renumbered(timeline: Timeline, batches: int, microbatches: int, updates: int) -> Timeline:
    """With all ops so many batches later, but at the same times."""
    if not batches:
        return timeline
    spans = (
        replace(
            span,
            op=replace(
                span.op,
                microbatch=span.op.microbatch + batches * microbatches,
                batch=span.op.batch + batches,
                version=span.op.version + batches * updates,
            ),
        )
        for span in timeline.spans
    )
    return replace(timeline, spans=tuple(spans))


def _forwards(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.op.kind is OpKind.FORWARD]


def _shown_batches(timeline: Timeline) -> tuple[int, int]:
    """The first and last batch that are shown: the last ones that are whole on every rank, as far
    as they are not too many."""
    forwards = _forwards(timeline)
    firsts = [
        min(span.op.batch for span in forwards if span.rank == rank)
        for rank in {span.rank for span in forwards}
    ]
    last = max(span.op.batch for span in forwards)
    whole = max(firsts) + (max(firsts) > 0)  # the recorder may have dropped a part of it
    per_batch = len(timeline.spans) / (last - min(firsts) + 1)
    return min(max(whole, last + 1 - max(int(MOST_SPANS / per_batch), 1)), last), last


def _panel(name: str, timeline: Timeline, first_batch: int) -> dict[str, Any]:
    zero = min(span.start_ns for span in _forwards(timeline) if span.op.batch == first_batch)
    rows = {rank: row for row, rank in enumerate(timeline.ranks)}
    spans = sorted(
        (span for span in timeline.spans if span.start_ns >= zero),
        key=lambda span: (span.rank, span.lane != COMPUTE_LANE, span.start_ns, span.end_ns),
    )
    gaps = [gap for gap in idle_gaps(timeline) if gap.end_ns > zero]
    end = max(span.end_ns for span in spans)
    stages = {span.rank: span.op.stage for span in spans}
    idle = {rank: [0] * len(_REASONS) for rank in rows}
    for gap in gaps:
        idle[gap.rank][_REASONS.index(gap.reason)] += gap.end_ns - max(gap.start_ns, zero)
    return {
        "name": name,
        "rows": [
            {"rank": rank, "stage": stages[rank], "idle": [ns / (end - zero) for ns in idle[rank]]}
            for rank in rows
        ],
        "spans": {
            "row": [rows[span.rank] for span in spans],
            "is_compute": [int(span.lane == COMPUTE_LANE) for span in spans],
            "kind": [_KINDS.index(span.op.kind) for span in spans],
            "microbatch": [span.op.microbatch for span in spans],
            "batch": [span.op.batch for span in spans],
            "version": [span.op.version for span in spans],
            "start_ns": [span.start_ns - zero for span in spans],
            "duration_ns": [span.duration_ns for span in spans],
        },
        "gaps": {
            "row": [rows[gap.rank] for gap in gaps],
            "reason": [_REASONS.index(gap.reason) for gap in gaps],
            "start_ns": [max(gap.start_ns - zero, 0) for gap in gaps],
            "end_ns": [gap.end_ns - zero for gap in gaps],
            "waits_for": [
                None if gap.waits_for is None else f"{gap.waits_for} on rank {gap.waits_on}"
                for gap in gaps
            ],
        },
    }
