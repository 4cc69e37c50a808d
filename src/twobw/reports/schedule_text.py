"""What ``twobw schedule`` prints: a schedule's grid, what each stage holds, what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from twobw.core.checker import Violation, check, format_violations
from twobw.core.costs import StageCost
from twobw.core.generators import generate
from twobw.core.grid import format_grid
from twobw.core.lowering import stage_ranks
from twobw.core.occupancy import in_flight, live_versions, ops_by_stage
from twobw.core.schedule import Schedule
from twobw.core.simulator import simulate
from twobw.core.torch_csv import read_csv, write_csv

_COST = StageCost(forward_ns=1, backward_ns=2)


def run_schedule_command(
    name: str | None = None,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    num_batches: int | None = None,
    output_format: Literal["grid", "csv"] = "grid",
    check_file: Path | None = None,
    rule: str | None = None,
    extra_in_flight: int = 0,
    update_lag: int = 0,
) -> tuple[str, int]:
    """The text of ``twobw schedule`` and its exit code: 1 if the schedule is illegal, else 0.

    Either ``name`` with the three sizes, or ``check_file``: a CSV of torch's, judged as one
    flushed batch or, with ``rule`` and ``num_microbatches``, by the rule of that schedule.

    Raises:
        ValueError: arguments that do not go together, or are out of range; a malformed CSV.
        OSError: the file cannot be read.
    """
    given = {"extra_in_flight": extra_in_flight, "update_lag": update_lag}
    options = {option: value for option, value in given.items() if value}
    if check_file is not None:
        csv = output_format if output_format == "csv" else None
        sizes = {"--stages": num_stages, "--batches": num_batches}
        _refuse("--check", {"NAME": name, **sizes, "--format": csv})
        if (rule is None) != (num_microbatches is None):
            raise ValueError(
                f"--rule is {rule!r} and --microbatches is {num_microbatches}; --check takes both, "
                "or neither for one flushed batch"
            )
        schedule = read_csv(
            _read_text(check_file), name=rule, num_microbatches=num_microbatches, **options
        )
    else:
        _refuse("NAME", {"--rule": rule})
        if name is None or num_stages is None or num_microbatches is None or num_batches is None:
            raise ValueError(
                "schedule needs NAME, --stages, --microbatches and --batches, or --check FILE.csv"
            )
        schedule = generate(name, num_stages, num_microbatches, num_batches, **options)
    if output_format == "csv":
        return write_csv(schedule).rstrip("\n"), 0
    return describe(schedule)


def _read_text(path: Path) -> str:
    """A CSV's text; spreadsheets may have put a byte-order mark before it.

    Raises:
        ValueError: it is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not UTF-8; a schedule's CSV is UTF-8 text"
        ) from None


def describe(schedule: Schedule) -> tuple[str, int]:
    """Grid, table of stages and the checker's verdict; and 0 if it is legal, 1 if not."""
    title = (
        f"{schedule.name}: stages {schedule.num_stages}, "
        f"microbatches a batch {schedule.num_microbatches}, batches {schedule.num_batches}"
    )
    violations = check(schedule)
    if violations:
        shown = format_violations(schedule, violations)
        count = "1 violation" if len(violations) == 1 else f"{len(violations)} violations"
        return f"{title}\n\n{shown}\n\nillegal: {count}{_only_order(violations)}", 1
    timeline = simulate(schedule, _COST)
    makespan = (
        f"makespan {timeline.makespan_ns}, "
        "where a forward takes 1, a backward 2, and all else nothing"
    )
    busy = [timeline.busy_fraction(rank) for rank in stage_ranks(schedule)]
    parts = [title, "", format_grid(schedule), "", *_stage_table(schedule, busy), "", makespan]
    return "\n".join([*parts, "legal: the checker finds nothing wrong"]), 0


def _only_order(violations: Iterable[Violation]) -> str:
    """Why an order that other runtimes would run is not legal here; empty for all other faults."""
    if {violation.rule for violation in violations} != {"order"}:
        return ""
    return (
        "\nAll are of the rule order: gradients are added in the order of the backwards, and only "
        "ascending microbatches\ngive the sums of plain training to the bit. Where rounding may "
        "differ, as in torch, such a schedule can run."
    )


def _stage_table(schedule: Schedule, busy: Iterable[float]) -> list[str]:
    """What each stage holds at most, of what is declared."""
    rows = [("stage", "live versions", "peak in flight", "busy")]
    limits = zip(schedule.num_versions, schedule.max_in_flight, busy, strict=True)
    for stage, (ops, (versions, most, share)) in enumerate(
        zip(ops_by_stage(schedule), limits, strict=True)
    ):
        rows.append(
            (
                str(stage),
                f"{max(live_versions(ops))} of {versions}",
                f"{max(in_flight(ops))} of {most}",
                f"{share:.0%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _refuse(beside: str, arguments: dict[str, object]) -> None:
    for argument, value in arguments.items():
        if value is not None:
            raise ValueError(f"{argument} is {value!r}; it has no meaning beside {beside}")
