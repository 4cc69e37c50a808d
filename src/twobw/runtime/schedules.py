"""Choosing a schedule: what is refused before anything runs, and what is warned of."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from twobw.core.checker import check, format_violations
from twobw.core.generators import NEVER_DRAINING, SCHEDULES, generate, options_of
from twobw.core.staleness import check_lookahead, check_recompute

_CHECKED_BATCHES = 4


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """A schedule by name, its microbatches a batch, its options."""

    name: str
    num_microbatches: int
    options: dict[str, int]

    def deferred(self) -> dict[str, int]:
        """The options that give reductions all the time there is, where that changes nothing."""
        return {**self.options, "defer_update": True} if self._has("defer_update") else self.options

    @property
    def wants_lag(self) -> bool:
        """Whether the time that reductions have is to be chosen, since it changes versions."""
        return self._has("update_lag") and "update_lag" not in self.options

    def lagging(self, update_lag: int) -> ScheduleChoice:
        """This, with reductions given ``update_lag`` microbatch slots."""
        return replace(self, options={**self.options, "update_lag": update_lag})

    def _has(self, option: str) -> bool:
        return self.name in SCHEDULES and option in options_of(self.name)


def check_schedule(
    choice: ScheduleChoice, num_stages: int, *, lookahead: float, recompute: str
) -> None:
    """Refuse a schedule that the checker refuses; warn of one that wastes.

    Raises:
        ValueError: an unknown name or option, sizes below 1, or violations, shown on the grid;
            look-ahead or recompute where it has no meaning.
    """
    p, m = num_stages, choice.num_microbatches
    most = choice.lagging(m).options if choice.wants_lag else choice.deferred()
    for options in (choice.options, most):
        schedule = generate(choice.name, p, m, _CHECKED_BATCHES, **options)
        violations = check(schedule)
        if violations:
            raise ValueError(
                f"schedule {choice.name!r} with {p} stages and {m} microbatches is illegal:\n"
                f"{format_violations(schedule, violations)}"
            )
    if lookahead:
        check_lookahead(choice.name, p, m, **choice.options)
    if recompute != "none":
        check_recompute(choice.name, p, m)
    if choice.name == "2bw" and p == 1:
        warnings.warn(
            "2bw with one stage keeps two weight versions and a gradient one batch old, and gains "
            "nothing; use schedule='1f1b'",
            stacklevel=4,
        )
    elif choice.name in NEVER_DRAINING and m < p - 1:
        warnings.warn(
            f"{choice.name} with {m} microbatches on {p} stages runs at {m}/{p - 1} of full "
            f"speed; use num_microbatches >= {p - 1}, better {p}",
            stacklevel=4,
        )
