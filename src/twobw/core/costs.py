"""What ops cost: the only cost code in the project."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageCost:
    """Times of one stage for one microbatch.

    Attributes:
        forward_ns: a forward.
        backward_ns: a backward.
        update_ns: an update of its weights.
    """

    forward_ns: int
    backward_ns: int
    update_ns: int = 0


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Time of a link between neighbouring stages for one microbatch.

    Attributes:
        transfer_ns: an activation, or its gradient, from one rank to the next.
    """

    transfer_ns: int = 0
