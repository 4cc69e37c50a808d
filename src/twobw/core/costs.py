"""What ops cost: the only cost code in the project. Times are integer nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of one stage for one microbatch.

    Attributes:
        forward_ns: a forward.
        backward_ns: a backward, with what is run again for it.
        update_ns: an update of its weights.
        reduce_ns: what an update's gradients take until they are summed over the replicas of the
            stage, beside its compute.
        output_bytes: what it gives to the next stage; as much comes back as gradient.
    """

    forward_ns: int
    backward_ns: int
    update_ns: int = 0
    reduce_ns: int = 0
    output_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A link between neighbouring stages, the same in both directions, which do not disturb each
    other. Messages of one direction follow each other.

    Attributes:
        transfer_ns: that every message takes of the link, whatever its size.
        latency_ns: from a message's last byte leaving to its arrival; takes nothing of the link.
        bytes_per_second: bandwidth.
    """

    transfer_ns: int = 0
    latency_ns: int = 0
    bytes_per_second: float = inf

    def occupied_ns(self, num_bytes: int) -> int:
        """How long a message takes of the link."""
        return self.transfer_ns + round(num_bytes * 1e9 / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class OverheadCost:
    """What a rank's own thread takes besides the layers.

    Attributes:
        op_ns: of a forward or a backward.
        message_ns: of handing a message over, or of taking one that has arrived.
        batch_ns: of beginning a batch.
    """

    op_ns: int = 0
    message_ns: int = 0
    batch_ns: int = 0


@dataclass(frozen=True, slots=True)
class SharedReduction:
    """A reduction that several stages make together, after each one's own: a tied weight's
    gradient, the global norm. It begins when the last of them has come to it.

    Attributes:
        stages: that take part.
        duration_ns: from then on.
    """

    stages: tuple[int, ...]
    duration_ns: int = 0


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """Costs of a whole pipeline.

    Attributes:
        stages: one for each stage.
        links: between stage ``s`` and ``s + 1``, one less than stages.
        overhead: of every rank.
        reductions: in the order in which a stage comes to them.
    """

    stages: tuple[StageCost, ...]
    links: tuple[LinkCost, ...]
    overhead: OverheadCost = OverheadCost()
    reductions: tuple[SharedReduction, ...] = ()

    @staticmethod
    def of(
        num_stages: int,
        stages: StageCost | Sequence[StageCost],
        links: LinkCost | Sequence[LinkCost] | None = None,
        overhead: OverheadCost | None = None,
        reductions: Sequence[SharedReduction] = (),
    ) -> PipelineCost:
        """From one cost for all stages or links, or one for each; links are free by default.

        Raises:
            ValueError: the number of costs is not that of the stages, or a shared reduction is of
                a stage that is not there.
        """
        each = (stages,) * num_stages if isinstance(stages, StageCost) else tuple(stages)
        if len(each) != num_stages:
            raise ValueError(
                f"stages has {len(each)} costs for {num_stages} stages; "
                "give one StageCost for all, or one for each"
            )
        if links is None or isinstance(links, LinkCost):
            links = (links or LinkCost(),) * (num_stages - 1)
        if len(links) != num_stages - 1:
            raise ValueError(
                f"links has {len(links)} costs for {num_stages} stages; "
                f"give one LinkCost for all, or {num_stages - 1}"
            )
        for reduction in reductions:
            if not all(0 <= stage < num_stages for stage in reduction.stages):
                raise ValueError(
                    f"a reduction of stages {reduction.stages}, but there are {num_stages}"
                )
        return PipelineCost(each, tuple(links), overhead or OverheadCost(), tuple(reductions))

    @property
    def reduces(self) -> bool:
        """Whether reductions take any time, or make a stage wait for another."""
        return bool(self.reductions) or any(stage.reduce_ns for stage in self.stages)
