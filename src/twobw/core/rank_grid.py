"""`RankGrid`: which rank has which stage and replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Placement = Literal["replicas", "pipelines"]
"""What neighbouring ranks are: replicas of a stage, or stages of a pipeline."""


@dataclass(frozen=True, slots=True)
class RankGrid:
    """``pp * dp`` ranks. Launchers fill one machine with ranks after the other, so that what
    neighbours send each other mostly stays within a machine.

    Attributes:
        pp: stages.
        dp: replicas of each.
        placement: what neighbouring ranks are.
    """

    pp: int
    dp: int
    placement: Placement = "replicas"

    def rank(self, stage: int, replica: int) -> int:
        """The rank at a place."""
        if self.placement == "replicas":
            return stage * self.dp + replica
        return replica * self.pp + stage

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and replica of a rank."""
        if self.placement == "replicas":
            return divmod(rank, self.dp)
        replica, stage = divmod(rank, self.pp)
        return stage, replica

    def replicas(self, stage: int) -> list[int]:
        """The ranks of a stage, by replica."""
        return [self.rank(stage, replica) for replica in range(self.dp)]

    def pipeline(self, replica: int) -> list[int]:
        """The ranks of a pipeline, by stage."""
        return [self.rank(stage, replica) for stage in range(self.pp)]

    def places(self) -> list[tuple[int, int]]:
        """Stage and replica of every rank, by rank."""
        return [self.place(rank) for rank in range(self.pp * self.dp)]
