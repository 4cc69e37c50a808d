"""What ``twobw report`` does: a run's folder, or a plan's file, as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twobw.core.timeline import Timeline
from twobw.planner.plan import Plan, load_plan
from twobw.reports.page.html import html_page
from twobw.reports.page.plans import alternatives_section, memory_section, plan_facts
from twobw.reports.page.timelines import batch_ns, is_drawable, timeline_section
from twobw.training.run_folder import TIMELINE, write_text
from twobw.training.run_reading import Run, load_run

PAGE = "report.html"
_MOST_POINTS = 1000  # of a curve; of more, neighbours are shown as their mean


def run_report_command(source: Path, out: Path | None = None) -> str:
    """Write the page; the text of ``twobw report``.

    Args:
        source: a run's folder, or a plan's file.
        out: where to write; by default ``report.html`` in the folder, or beside the plan under
            its name.

    Raises:
        ValueError: ``source`` is neither, or a file in it does not hold what it should.
        OSError: a file cannot be read or written.
    """
    if source.is_dir():
        run = load_run(source)
        title, content = f"{source.resolve().name}: a run", run_content(run)
        out = out or source / PAGE
    else:
        plan = load_plan(source)
        title, content = f"{source.stem}: a plan", plan_content(plan)
        out = out or source.with_suffix(".html")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, html_page(title, {"title": title, **content}))
    return f"the report is in {out} (open it in a browser)"


def plan_content(plan: Plan) -> dict[str, Any]:
    """What the page shows of a plan without a run."""
    return {
        "facts": plan_facts(plan),
        "notes": _notes_on(plan),
        "timeline": timeline_section(plan, None),
        "memory": memory_section(plan, None),
        "training": None,
        "alternatives": alternatives_section(plan),
    }


def run_content(run: Run) -> dict[str, Any]:
    """What the page shows of a run: all that there is, and how to get what is not."""
    notes = []
    if run.plan_problem:
        notes.append(f"{run.plan_problem}, so nothing was predicted for it.")
        run = replace(run, plan=None)
    if run.plan is not None:
        notes += _notes_on(run.plan)
    elif not notes:
        notes.append(
            "This run was not started from a plan, so nothing was predicted for it. "
            "`twobw train CONFIG --parallel auto` chooses a plan first, and `--parallel PLAN` "
            "takes one that `twobw plan` has written."
        )
    if run.ending is None:
        notes.append("The run has not ended, or was killed: there is no summary of it yet.")
    elif run.ending.failure:
        notes.append(f"The run failed: {run.ending.failure}")
    if run.timeline is None:
        notes.append(f"There is no measured timeline: a run writes {TIMELINE} when it ends.")
    elif switched := _batches_before(run.timeline, run):
        notes.append(
            f"The timeline's batch 0 is the run's batch {switched}: numbers begin anew where the "
            "schedule changes or a run is resumed."
        )
    peaks = [stage.peak_bytes for stage in run.batches[-1].stages] if run.batches else None
    if peaks:
        notes.append(
            "Measured memory is what a GPU had allocated at most; on a CPU what the process had "
            "resident beyond interpreter and libraries, the training text among it."
        )
    return {
        "facts": _run_facts(run),
        "notes": notes,
        "timeline": timeline_section(run.plan, run.timeline),
        "memory": memory_section(run.plan, peaks),
        "training": _training_section(run),
        "alternatives": alternatives_section(run.plan) if run.plan else None,
    }


def _batches_before(timeline: Timeline, run: Run) -> int:
    """Batches that were trained before the timeline's batch 0: a new schedule counts anew."""
    if not timeline.spans or not run.batches:
        return 0
    return run.batches[-1].batch - max(span.op.batch for span in timeline.spans)


def _notes_on(plan: Plan) -> list[str]:
    notes = []
    if not is_drawable(plan):
        notes.append("The plan's batches have too many microbatches to be drawn here.")
    if not plan.alternatives:
        notes.append(
            "The plan does not say what it was chosen among; the one that "
            "`twobw plan ... --out PLAN` writes does, unless it is by the paper's cost model."
        )
    return notes


def _run_facts(run: Run) -> list[tuple[str, str]]:
    """The run in a few lines, what was predicted beside what was measured."""
    model, parallel, training = (
        run.config.get(section, {}) for section in ("model", "parallel", "training")
    )
    layout = ("schedule", "pp", "dp", "num_microbatches")
    facts = [
        ("model", f"{model.get('name')}, {training.get('precision')}"),
        ("layout", ", ".join(f"{name} = {parallel.get(name)}" for name in layout)),
        ("batches", str(len(run.batches))),
    ]
    if run.timeline is not None:
        facts += _batch_time(run.plan, run.timeline)
    if run.ending is not None:
        facts.append(("throughput", f"{run.ending.tokens_per_second:,.0f} tokens/s"))
        rate = _predicted_rate(run)
        if rate is not None:
            facts.append(("predicted throughput", f"{rate:,.0f} tokens/s"))
    if run.batches and run.batches[-1].loss is not None:
        facts.append(("last training loss", f"{run.batches[-1].loss:.4f}{_unit(run)}"))
    if run.validations and run.validations[-1].validation_loss is not None:
        loss = run.validations[-1].validation_loss
        facts.append(("last validation loss", f"{loss:.4f}{_unit(run)}"))
    return facts


def _batch_time(plan: Plan | None, timeline: Timeline) -> list[tuple[str, str]]:
    measured_ns = batch_ns(timeline)
    if measured_ns is None:
        return []
    facts = [("time of a batch", f"{measured_ns / 1e6:.1f} ms")]
    if plan is not None:
        error = plan.batch_ns / measured_ns - 1
        facts.append(("predicted time of a batch", f"{plan.batch_ns / 1e6:.1f} ms ({error:+.1%})"))
    return facts


def _unit(run: Run) -> str:
    return f" {run.ending.loss_unit}" if run.ending else ""


def _predicted_rate(run: Run) -> float | None:
    """Tokens a second."""
    if run.plan is None or run.ending is None or not run.ending.samples:
        return None
    return run.plan.samples_per_second * run.ending.tokens / run.ending.samples


def _training_section(run: Run) -> dict[str, Any] | None:
    """Curves over batches; None before the first one."""
    if not run.batches:
        return None
    return {
        "loss_unit": run.ending.loss_unit if run.ending else "",
        "loss": thinned([(row.batch, row.loss) for row in run.batches]),
        "tokens_per_second": thinned([(row.batch, row.tokens_per_second) for row in run.batches]),
        "predicted_tokens_per_second": _predicted_rate(run),
        "validation_loss": thinned([(v.num_batches, v.validation_loss) for v in run.validations]),
    }


def thinned(points: Sequence[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """At most `_MOST_POINTS` points: means of equally many neighbours. Those without a value are
    left out."""
    known = [(x, y) for x, y in points if y is not None]
    size = -(-len(known) // _MOST_POINTS)
    groups = (known[start : start + size] for start in range(0, len(known), size or 1))
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]
