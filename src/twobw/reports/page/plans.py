"""What the page shows of a plan: memory by stage and kind, and what it was chosen among."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twobw.planner.plan import Alternative, Plan


def memory_section(
    plan: Plan | None, measured_bytes: Sequence[int] | None
) -> dict[str, Any] | None:
    """Bytes of each stage by kind, and the peaks that were measured; None without either. Kinds
    that no stage has are left out.

    Args:
        plan: what is predicted.
        measured_bytes: by stage.
    """
    if plan is None and measured_bytes is None:
        return None
    stages = () if plan is None else plan.stages
    kinds = list(dict.fromkeys(k for stage in stages for k in stage.memory if stage.memory[k]))
    count = len(stages) if measured_bytes is None else len(measured_bytes)
    return {
        "limit_bytes": None if plan is None else plan.device_memory_bytes,
        "kinds": kinds,
        "stages": [
            {
                "predicted": [stages[n].memory.get(kind, 0) for kind in kinds] if stages else None,
                "measured": None if measured_bytes is None else measured_bytes[n],
            }
            for n in range(count)
        ],
    }


def alternatives_section(plan: Plan) -> dict[str, Any] | None:
    """Throughput over memory of all that the plan was chosen among; None if it does not say."""
    if not plan.alternatives:
        return None
    return {
        "limit_bytes": plan.device_memory_bytes,
        "chosen": plan.layout,
        "layout": [other.layout for other in plan.alternatives],
        "schedule": [other.schedule for other in plan.alternatives],
        "samples_per_second": [other.samples_per_second for other in plan.alternatives],
        "peak_bytes": [other.peak_bytes for other in plan.alternatives],
        "is_simulated": [other.is_simulated for other in plan.alternatives],
        "frontier": frontier(plan.alternatives),
    }


def frontier(alternatives: Sequence[Alternative]) -> list[int]:
    """The places of those than which none is both leaner and faster, the leanest first."""
    order = sorted(
        range(len(alternatives)),
        key=lambda n: (alternatives[n].peak_bytes, -alternatives[n].samples_per_second),
    )
    found: list[int] = []
    for place in order:
        speed = alternatives[place].samples_per_second
        if not found or speed > alternatives[found[-1]].samples_per_second:
            found.append(place)
    return found


def plan_facts(plan: Plan) -> list[tuple[str, str]]:
    """A plan in a few lines, each a name and a value."""
    return [
        ("model", f"{plan.model}, {plan.precision}, {plan.optimizer}"),
        ("devices", f"{plan.pp * plan.dp} of {plan.cluster} ({plan.device})"),
        ("layout", plan.layout),
        ("layers of each stage", " ".join(map(str, plan.split))),
        ("predicted time of a batch", f"{plan.batch_ns / 1e6:.1f} ms"),
        ("predicted throughput", f"{plan.samples_per_second:.1f} samples/s"),
        ("predicted bubble", f"{plan.bubble:.1%}"),
        (
            "predicted memory",
            f"{plan.peak_bytes / 1e9:.2f} of {plan.device_memory_bytes / 1e9:.2f} GB",
        ),
    ]
