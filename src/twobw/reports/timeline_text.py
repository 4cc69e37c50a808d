"""What ``twobw simulate`` does and prints."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from twobw.core.costs import LinkCost, PipelineCost, StageCost
from twobw.core.critical_path import critical_path
from twobw.core.dependencies import compute_spans
from twobw.core.idle import HELP, Gap, Reason, idle_gaps
from twobw.core.steady import SteadyState, steady_state
from twobw.planner.plan import Plan, load_plan
from twobw.reports.perfetto import chrome_trace
from twobw.reports.table_text import aligned

_SHOWN_BATCHES = 5
_LOOKED_AT = 3  # the one of them that is reported on: those before it have settled


def run_simulate_command(
    plan_file: Path | None = None,
    *,
    schedule: str | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    num_batches: int = 100,
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    transfer_ms: float = 0.0,
    extra_in_flight: int = 0,
    trace: Path | None = None,
) -> str:
    """Simulate a plan, or a schedule with equal stages; the text of ``twobw simulate``.

    Raises:
        ValueError: arguments that do not go together, or are out of range; a file without a plan.
        OSError: a file cannot be read or written.
    """
    if num_batches < 1:
        raise ValueError(f"--batches is {num_batches}; it must be at least 1")
    if (plan_file is None) == (schedule is None):
        raise ValueError("simulate needs a plan's file, or --schedule")
    plan = None
    if plan_file is not None:
        plan = load_plan(plan_file)
        state = steady_state(plan.schedule, plan.num_microbatches, plan.cost(), **plan.options)
    else:
        assert schedule is not None, "one of both is given"
        if num_stages is None or num_microbatches is None:
            raise ValueError("--schedule needs --stages and --microbatches")
        times_ms = (forward_ms, backward_ms, transfer_ms)
        cost = _equal_stages(num_stages, *times_ms)
        options = {"extra_in_flight": extra_in_flight} if extra_in_flight else {}
        state = steady_state(schedule, num_microbatches, cost, **options)
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(state.timeline(_SHOWN_BATCHES))), "utf-8")
    return simulation_text(state, num_batches, plan)


def simulation_text(state: SteadyState, num_batches: int, plan: Plan | None = None) -> str:
    """How long batches take, what each rank does meanwhile, and why it waits."""
    period_ns = float(state.period_ns)
    whole_ns = state.makespan_ns(num_batches)
    stages, m = len(state.cost.stages), state.num_microbatches
    lines = [
        f"{state.name}: {stages} stages, {m} microbatches a batch",
        f"a batch takes {period_ns / 1e6:.3f} ms; {num_batches} batches {whole_ns / 1e6:.3f} ms, "
        f"filling and draining {(whole_ns - num_batches * period_ns) / 1e6:.3f} ms of it",
    ]
    if plan is not None:
        rate = plan.global_batch_size / period_ns * 1e9
        lines.append(f"{rate:.2f} samples a second on {plan.pp * plan.dp} devices")
    timeline = state.timeline(_SHOWN_BATCHES)
    gaps = _gaps_of_one_batch(state, idle_gaps(timeline))
    parts = ["\n".join(lines), _rank_table(state, gaps, plan)]
    helps = [f"  {reason.value}: {HELP[reason]}" for reason in Reason if _total(gaps, reason)]
    if helps:
        parts.append("\n".join(["what would help", *helps]))
    path: Counter[str] = Counter()
    for span in critical_path(timeline):
        path[f"{span.op.kind.name.lower()} on stage {span.op.stage}"] += span.duration_ns
    total = sum(path.values())
    longest = ", ".join(f"{what} {ns / total:.0%}" for what, ns in path.most_common(4) if ns)
    return "\n\n".join([*parts, f"critical path: {longest}"])


def _rank_table(state: SteadyState, gaps: list[Gap], plan: Plan | None) -> str:
    """Parts of a batch's time, rank by rank, and whom it waits on most."""
    period_ns = float(state.period_ns)
    reasons = [reason for reason in Reason if _total(gaps, reason)]
    memory = ("GB",) if plan else ()
    rows = [("rank", "busy", *(r.value for r in reasons), "waits most on", *memory)]
    for rank in range(len(state.cost.stages)):
        own = [gap for gap in gaps if gap.rank == rank]
        idle = {reason: _total(own, reason) for reason in reasons}
        busy = 1 - sum(idle.values()) / period_ns
        held = (f"{plan.stages[rank].memory_bytes / 1e9:.2f}",) if plan else ()
        parts = (f"{ns / period_ns:.1%}" for ns in idle.values())
        rows.append((str(rank), f"{busy:.1%}", *parts, _waits_most_on(own), *held))
    return aligned(rows)


def _waits_most_on(gaps: list[Gap]) -> str:
    waits: Counter[int] = Counter()
    for gap in gaps:
        if gap.waits_on is not None:
            waits[gap.waits_on] += gap.duration_ns
    return f"rank {waits.most_common(1)[0][0]}" if waits else "-"


def _gaps_of_one_batch(state: SteadyState, gaps: list[Gap]) -> list[Gap]:
    """Those before the ops of one batch's time on each rank."""
    timeline = state.timeline(1)
    first = {rank: compute_spans(timeline, rank) for rank in timeline.ranks}
    places = {
        (rank, span.op.kind, span.op.microbatch + _LOOKED_AT * state.num_microbatches)
        for rank, spans in first.items()
        for span in spans
    }
    return [
        gap
        for gap in gaps
        if gap.before and (gap.rank, gap.before.kind, gap.before.microbatch) in places
    ]


def _total(gaps: list[Gap], reason: Reason) -> int:
    return sum(gap.duration_ns for gap in gaps if gap.reason is reason)


def _equal_stages(
    num_stages: int, forward_ms: float, backward_ms: float, transfer_ms: float
) -> PipelineCost:
    names = ("--forward-ms", "--backward-ms", "--transfer-ms")
    for name, value in zip(names, (forward_ms, backward_ms, transfer_ms), strict=True):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}; it must be at least 0")
    if num_stages < 1:
        raise ValueError(f"--stages is {num_stages}; it must be at least 1")
    stage = StageCost(round(forward_ms * 1e6), round(backward_ms * 1e6))
    return PipelineCost.of(num_stages, stage, LinkCost(round(transfer_ms * 1e6)))
