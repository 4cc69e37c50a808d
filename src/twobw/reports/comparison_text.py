"""A run's measured figures beside what was predicted of it, as text."""

from __future__ import annotations

from collections.abc import Sequence

from twobw.core.breakdown import Breakdown, break_down
from twobw.core.idle import HELP, Reason
from twobw.core.rank_grid import RankGrid
from twobw.core.steady import steady_state
from twobw.core.timeline import Timeline
from twobw.planner.plan import Plan
from twobw.reports.table_text import aligned

_PLAYED = 6  # batches, of which those in the middle count
_CAUSES = {
    "bubble": (Reason.BUBBLE,),
    "imbalance": (Reason.IMBALANCE,),
    "communication": (Reason.LINK, Reason.REDUCTION),
    "overhead": (Reason.OVERHEAD,),
}
_SMALL = 0.02  # part of a batch's time that is not worth a remedy


def comparison_text(plan: Plan, measured: Timeline, peak_bytes: Sequence[int]) -> str:
    """Time of a batch, each stage's busy and idle time and memory, and what throughput was lost
    to: predicted beside measured.

    Args:
        plan: of the run.
        measured: its last batches.
        peak_bytes: measured of each stage, of its first replica.

    Raises:
        ValueError: the timeline has too few whole batches.
    """
    found = break_down(measured)
    if found is None:
        raise ValueError("the run's timeline has fewer than two batches between its first and last")
    state = steady_state(plan.schedule, plan.num_microbatches, plan.cost(), **plan.options)
    played = break_down(state.timeline(_PLAYED))
    assert played is not None, "so many batches have some in the middle"
    parts = [
        f"{plan.model}: {plan.layout}, layers {list(plan.split)}; predicted from {plan.device}",
        _times(plan, found.period_ns),
        _stages(plan, played, found, peak_bytes),
        _causes(plan, played, found),
    ]
    return "\n\n".join(parts)


def _times(plan: Plan, measured_ns: float) -> str:
    size = plan.global_batch_size
    rates = [size / ns * 1e9 for ns in (plan.batch_ns, measured_ns)]
    return aligned(
        [
            ("", "predicted", "measured", "predicted over measured"),
            (
                "time of a batch, ms",
                f"{plan.batch_ns / 1e6:.2f}",
                f"{measured_ns / 1e6:.2f}",
                f"{plan.batch_ns / measured_ns:.3f}",
            ),
            (
                "samples a second",
                f"{rates[0]:.1f}",
                f"{rates[1]:.1f}",
                f"{rates[0] / rates[1]:.3f}",
            ),
        ]
    )


def _stages(plan: Plan, played: Breakdown, found: Breakdown, peak_bytes: Sequence[int]) -> str:
    """A line a stage and kind of figure: parts of a batch's time, and the memory's peak."""
    predicted = [played.of_ranks([stage]) for stage in range(plan.pp)]
    grid = RankGrid(plan.pp, plan.dp, plan.placement)
    measured = [found.of_ranks(grid.replicas(stage)) for stage in range(plan.pp)]
    reasons = [
        reason.value
        for reason in Reason
        if any(round(parts[reason.value], 3) for parts in (*predicted, *measured))
    ]
    rows = [("stage", "", "busy", *reasons, "peak GB")]
    for stage in range(plan.pp):
        for name, parts, peak in (
            ("predicted", predicted[stage], plan.stages[stage].memory_bytes),
            ("measured", measured[stage], peak_bytes[stage]),
        ):
            shares = (f"{parts[reason]:.1%}" for reason in ("work", *reasons))
            rows.append((str(stage), name, *shares, f"{peak / 1e9:.3f}"))
    return aligned(rows, num_left=2)


def _causes(plan: Plan, played: Breakdown, found: Breakdown) -> str:
    """What a batch's time goes to, mean over the ranks, and what would help."""
    of = {
        "predicted": (plan.batch_ns, played.of_ranks(sorted(played.busy))),
        "measured": (found.period_ns, found.of_ranks(sorted(found.busy))),
    }
    rows = [
        ("a batch's time, mean over the ranks", *(f"{name} ms" for name in of), "measured part")
    ]
    shares = {name: _by_cause(parts) for name, (_, parts) in of.items()}
    for cause in ("work", *_CAUSES):
        cells = (f"{shares[name][cause] * ns / 1e6:.2f}" for name, (ns, _) in of.items())
        rows.append((cause, *cells, f"{shares['measured'][cause]:.1%}"))
    helps = [
        f"  {reason.value}: {HELP[reason]}"
        for reasons in _CAUSES.values()
        for reason in reasons
        if of["measured"][1][reason.value] > _SMALL
    ]
    return "\n".join([aligned(rows), *(["", "what would help", *helps] if helps else [])])


def _by_cause(parts: dict[str, float]) -> dict[str, float]:
    causes = {
        cause: sum(parts[reason.value] for reason in reasons) for cause, reasons in _CAUSES.items()
    }
    return {"work": parts["work"], **causes}
