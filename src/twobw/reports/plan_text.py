"""What ``twobw plan`` does and prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from twobw.planner.cluster import ClusterSpec, load_cluster
from twobw.planner.configuration import Training
from twobw.planner.paper import find_paper_plans
from twobw.planner.plan import Plan
from twobw.planner.search import Search, find_plans
from twobw.planner.units import unit_of
from twobw.profiler.profile import load_profile
from twobw.reports.table_text import aligned

_MOST_REJECTIONS = 8
_GB = 1e9

CostModel = Literal["simulation", "paper"]


def run_plan_command(
    profile_file: Path,
    cluster_file: Path,
    global_batch_size: int,
    *,
    memory_gb: float | None = None,
    top: int = 10,
    cost_model: CostModel = "simulation",
    out: Path | None = None,
) -> tuple[str, int]:
    """Search, write the best plan to a file if one is given; the text of ``twobw plan`` and its
    exit code: 1 if nothing fits, else 0.

    Raises:
        ValueError: files that do not hold what they should, or numbers that do not fit.
        OSError: a file cannot be read or written.
    """
    for name, value in (("--global-batch", global_batch_size), ("--top", top)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    profile, cluster = load_profile(profile_file), load_cluster(cluster_file)
    if memory_gb is not None:
        if not 0 < memory_gb < float("inf"):
            raise ValueError(f"--memory is {memory_gb}; it must be above 0")
        cluster = cluster.model_copy(update={"device_memory_bytes": round(memory_gb * _GB)})
    training = Training(global_batch_size)
    if cost_model == "paper":
        search = Search(find_paper_plans(profile, cluster, training, top=top), [], 0)
    else:
        search = find_plans(profile, cluster, training, top=top)
    parts = [_title(profile.model, cluster, global_batch_size), search_text(search)]
    if search.plans and out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(search.plans[0].to_json(), encoding="utf-8")
        parts.append(f"the best plan is in {out}")
    return "\n\n".join(parts), 0 if search.plans else 1


def search_text(search: Search) -> str:
    """Plans, the best one by stage, and what does not fit."""
    if not search.plans:
        parts = ["nothing fits", "\n".join(map(str, search.rejections[:_MOST_REJECTIONS]))]
        if search.remedies:
            parts.append("\n".join(["it would with", *(f"  {r}" for r in search.remedies)]))
        return "\n\n".join(filter(None, parts))
    parts = [plans_table(search.plans), stages_table(search.plans[0])]
    if search.plans[0].losses:
        parts.append(losses_line(search.plans[0]))
    if search.rejections:
        shown = [str(rejection) for rejection in search.rejections[:_MOST_REJECTIONS]]
        left = len(search.rejections) - len(shown)
        shown += [f"... and {left} more depths"] if left else []
        parts.append("\n".join(["what does not fit:", *shown]))
    return "\n\n".join(parts)


def plans_table(plans: Sequence[Plan]) -> str:
    """A line a plan."""
    size, unit = unit_of(max(plan.peak_bytes for plan in plans))
    head = ("", "pp", "dp", "schedule", "recompute", "within nodes", "b", "m", "extra", "lag")
    rows: list[tuple[str, ...]] = [
        (*head, "ms a batch", "samples/s", "bubble", f"{unit} at most", "layers")
    ]
    for number, plan in enumerate(plans, 1):
        rows.append(
            (
                *(str(number), str(plan.pp), str(plan.dp), plan.schedule, plan.recompute),
                *(plan.placement, str(plan.microbatch_size), str(plan.num_microbatches)),
                *(str(plan.extra_in_flight), str(plan.update_lag)),
                f"{plan.batch_ns / 1e6:.1f}",
                f"{plan.samples_per_second:.1f}",
                f"{plan.bubble:.1%}",
                f"{plan.peak_bytes / size:.2f}",
                split_text(plan.split),
            )
        )
    return aligned(rows, num_left=6)


def stages_table(plan: Plan) -> str:
    """What each stage of a plan holds, by kind; kinds that no stage has are left out."""
    size, unit = unit_of(plan.peak_bytes)
    kinds = [k for k in plan.stages[0].memory if any(stage.memory[k] for stage in plan.stages)]
    rows = [("stage", "layers", *(kind.replace("_", " ") for kind in kinds), f"{unit} in all")]
    for number, stage in enumerate(plan.stages):
        held = (f"{stage.memory[kind] / size:.2f}" for kind in kinds)
        rows.append((str(number), str(stage.num_layers), *held, f"{stage.memory_bytes / size:.2f}"))
    limit = plan.device_memory_bytes / size
    return f"the first, by stage, of {limit:,.0f} {unit}:\n{aligned(rows, num_left=0)}"


def losses_line(plan: Plan) -> str:
    """Where a batch's time goes."""
    total = sum(plan.losses.values())
    parts = (f"{cause} {ns / total:.1%}" for cause, ns in plan.losses.items())
    return f"a batch's time: {', '.join(parts)}"


def split_text(split: Sequence[int]) -> str:
    """Equal neighbours together: ``3 4*6 3``."""
    runs: list[list[int]] = []
    for count in split:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return " ".join(f"{count}*{times}" if times > 1 else str(count) for count, times in runs)


def _title(model: str, cluster: ClusterSpec, global_batch_size: int) -> str:
    size, unit = unit_of(cluster.device_memory_bytes)
    return (
        f"{model} on {cluster.name}: {cluster.num_devices} devices of "
        f"{cluster.device_memory_bytes / size:.1f} {unit}, batches of {global_batch_size} samples"
    )
