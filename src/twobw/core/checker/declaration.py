"""Rules about what a schedule declares, and about who owns which stage."""

from __future__ import annotations

from collections.abc import Iterator

from twobw.core.checker.violation import Violation
from twobw.core.generators import SCHEDULES, check_options
from twobw.core.schedule import Schedule


def declaration(schedule: Schedule) -> Iterator[Violation]:
    """Sizes, slots, limits and options that make no sense."""
    for size in (
        "num_stages",
        "num_microbatches",
        "num_batches",
        "microbatches_per_update",
        "num_gradient_buffers",
    ):
        value = getattr(schedule, size)
        if value < 1:
            yield _fault(f"{size} is {value}; it must be at least 1")
    for limits in ("num_versions", "max_in_flight"):
        values = getattr(schedule, limits)
        if len(values) != schedule.num_stages:
            yield _fault(f"{limits} has {len(values)} values for {schedule.num_stages} stages")
        for stage, value in enumerate(values):
            if value < 1:
                yield _fault(f"{limits} of stage {stage} is {value}; it must be at least 1")
    per_update = schedule.microbatches_per_update
    if per_update >= 1 and schedule.num_microbatches % per_update:
        yield _fault(
            f"microbatches_per_update is {per_update}; "
            f"it must divide num_microbatches, {schedule.num_microbatches}"
        )
    if schedule.name in SCHEDULES:
        try:
            check_options(schedule.name, dict(schedule.options))
        except ValueError as error:
            yield _fault(str(error))


def ownership(schedule: Schedule) -> Iterator[Violation]:
    """Stages that do not exist, that no rank has, or that two ranks have."""
    owners: dict[int, int] = {}
    for rank, program in enumerate(schedule.programs):
        strangers: set[int] = set()
        for index, op in enumerate(program):
            if not 0 <= op.stage < schedule.num_stages:
                message = f"stages are 0..{schedule.num_stages - 1}"
            elif owners.setdefault(op.stage, rank) != rank and op.stage not in strangers:
                strangers.add(op.stage)
                message = f"stage {op.stage} belongs to rank {owners[op.stage]}"
            else:
                continue
            yield Violation(rank, index, op, "owner", message)
    for stage in range(schedule.num_stages):
        if stage not in owners:
            yield Violation(None, None, None, "owner", f"no rank has an op of stage {stage}")


def _fault(message: str) -> Violation:
    return Violation(None, None, None, "declaration", message)
