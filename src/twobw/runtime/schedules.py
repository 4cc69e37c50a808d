"""Choosing a schedule: what is refused before anything runs, and what is warned of."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from twobw.core.checker import check, format_violations
from twobw.core.generators import SCHEDULES, generate, options_of

_CHECKED_BATCHES = 4


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """A schedule by name, its microbatches a batch, its options."""

    name: str
    num_microbatches: int
    options: dict[str, int]

    def deferred(self) -> dict[str, int]:
        """The options that give reductions the time to arrive, where the schedule has any."""
        can_defer = self.name in SCHEDULES and "defer_update" in options_of(self.name)
        return {**self.options, "defer_update": True} if can_defer else self.options


def check_schedule(choice: ScheduleChoice, num_stages: int) -> None:
    """Refuse a schedule that the checker refuses; warn of one that wastes.

    Raises:
        ValueError: an unknown name or option, sizes below 1, or violations, shown on the grid.
    """
    p, m = num_stages, choice.num_microbatches
    for options in (choice.options, choice.deferred()):
        schedule = generate(choice.name, p, m, _CHECKED_BATCHES, **options)
        violations = check(schedule)
        if violations:
            raise ValueError(
                f"schedule {choice.name!r} with {p} stages and {m} microbatches is illegal:\n"
                f"{format_violations(schedule, violations)}"
            )
    if choice.name == "2bw" and p == 1:
        warnings.warn(
            "2bw with one stage keeps two weight versions and a gradient one batch old, and gains "
            "nothing; use schedule='1f1b'",
            stacklevel=4,
        )
    elif choice.name == "2bw" and m < p - 1:
        warnings.warn(
            f"2bw with {m} microbatches on {p} stages runs at {m}/{p - 1} of full speed; "
            f"use num_microbatches >= {p - 1}, better {p}",
            stacklevel=4,
        )
