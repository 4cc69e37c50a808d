"""Is a schedule legal? Every rule, for any schedule, without running it.

========================  =========================================================================
rule                      what it asks
========================  =========================================================================
``declaration``           sizes, slots and limits are at least 1 and there is one for each stage;
                          options are those of the schedule of this name
``owner``                 every stage has its ops in one rank's program
``numbering``             microbatches and batches are numbered through the run, updates by version
``once``                  every microbatch has one forward and one backward on every stage
``order``                 forwards ascend, and so do backwards (gradients are added in that order)
``forward-first``         a backward comes after its forward
``same-version``          a backward runs on the version of its forward or, where the schedule
                          declares ``backward_on_newest``, on the newest that there may be then
``version-rule``          versions are those that the schedule of this name and options prescribes
``buffered``              that version is made, and its slot not yet overwritten
``updates``               versions 1, 2, ... are each made once, after their last backward
``slot``                  an update never writes the slot of a version that a backward needs
``in-flight``             microbatches in flight stay within ``max_in_flight``
``live-versions``         versions still needed stay within ``num_versions``
``gradient-buffers``      updates whose gradients are begun stay within ``num_gradient_buffers``
``reduce``                a reduction lies between an update's last backward and the update; all
                          updates have one, or none has
``transfer``              each op has its receives before it and its sends after it, once
``edge``                  what one stage sends to the next is received in the same order
``deadlock``              all programs played together, with sends that do not block, end
========================  =========================================================================

An edge is one direction between two neighbouring stages. Programs of compute ops alone are lowered
here for the last three rules. Of a schedule whose name is not in the registry, ``version-rule``
is not asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from twobw.core.checker.declaration import declaration, ownership
from twobw.core.checker.stage import stage_violations
from twobw.core.checker.transfers import transfer_violations
from twobw.core.checker.violation import Violation
from twobw.core.grid import format_grid
from twobw.core.schedule import Schedule

__all__ = ["Violation", "check", "format_violations"]


def check(schedule: Schedule) -> list[Violation]:
    """Every broken rule, by place in the programs, those of missing ops last; empty if legal.

    Where the declaration is broken nothing else is judged; where stages have no clear owner,
    transfers are not.
    """
    violations = list(declaration(schedule))
    if violations:
        return violations
    violations = list(ownership(schedule))
    is_owned = not violations
    violations += stage_violations(schedule)
    if is_owned:
        violations += transfer_violations(schedule)
    return sorted(violations, key=_place)


def format_violations(schedule: Schedule, violations: Sequence[Violation]) -> str:
    """The grid with the faulty ops marked (``>F3@1<``), and a line for each violation."""
    faulty = {
        (violation.rank, violation.index)
        for violation in violations
        if violation.rank is not None and violation.index is not None
    }
    return "\n".join([format_grid(schedule, faulty), "", *map(str, violations)])


def _place(violation: Violation) -> tuple[bool, int, int]:
    index = violation.index
    return index is None, index or 0, -1 if violation.rank is None else violation.rank
