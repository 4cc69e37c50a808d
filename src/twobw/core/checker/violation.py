"""`Violation`: one broken rule, and where."""

from __future__ import annotations

from dataclasses import dataclass

from twobw.core.ops import Op


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule.

    Attributes:
        rank: whose program breaks it; None where the schedule as a whole does.
        index: of the op in ``programs[rank]``; None where an op is missing.
        op: that op; None where an op is missing.
        rule: short name of the rule, as listed in `twobw.core.checker`.
        message: what is wrong, in a sentence.
    """

    rank: int | None
    index: int | None
    op: Op | None
    rule: str
    message: str

    def __str__(self) -> str:
        """One line: where, which rule, what is wrong."""
        where = "schedule" if self.rank is None else f"rank {self.rank}"
        if self.index is not None:
            where += f", op {self.index}"
        if self.op is not None:
            where += f", {self.op} of stage {self.op.stage}"
        return f"{where}: {self.rule}: {self.message}"
