"""Where the throughput goes: a batch's time by cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean

from twobw.core.costs import LinkCost, PipelineCost, StageCost
from twobw.core.generators import stage_rule
from twobw.core.steady import steady_state


@dataclass(frozen=True, slots=True)
class Losses:
    """A batch's time in steady state, in ns; the parts add up to it.

    Attributes:
        work_ns: forwards, backwards and updates, spread evenly over the stages.
        bubble_ns: what the schedule leaves idle with equal stages.
        imbalance_ns: because stages are not equal.
        overhead_ns: because ranks do something else.
        link_ns: because messages take time.
        reduction_ns: because reductions take time.
    """

    work_ns: float
    bubble_ns: float
    imbalance_ns: float
    overhead_ns: float
    link_ns: float
    reduction_ns: float

    @property
    def period_ns(self) -> float:
        """Time a batch."""
        return self.work_ns + sum(self.by_cause().values())

    def by_cause(self) -> dict[str, float]:
        """What is lost, by the name of the cause."""
        return {
            "bubble": self.bubble_ns,
            "imbalance": self.imbalance_ns,
            "overhead": self.overhead_ns,
            "link": self.link_ns,
            "reduction": self.reduction_ns,
        }


def find_losses(name: str, num_microbatches: int, cost: PipelineCost, **options: int) -> Losses:
    """Each cause is what the period grows by when it comes to those before it; in the order of
    `Losses`.

    Args:
        name: of a schedule of the registry.
        num_microbatches: of a batch.
        cost: of everything.
        **options: of the schedule.

    Raises:
        ValueError: as `twobw.core.generators.stage_rule`.
    """
    num_stages = len(cost.stages)
    real = tuple(replace(stage, reduce_ns=0) for stage in cost.stages)
    equal = (_mean(real),) * num_stages
    free = (LinkCost(),) * (num_stages - 1)
    steps = [
        PipelineCost(equal, free),
        PipelineCost(real, free),
        PipelineCost(real, free, cost.overhead),
        PipelineCost(real, cost.links, cost.overhead),
        cost,
    ]
    periods = [
        float(steady_state(name, num_microbatches, step, **options).period_ns) for step in steps
    ]
    rule = stage_rule(name, 0, num_stages, num_microbatches, **options)
    updates = num_microbatches // rule.microbatches_per_update
    work = num_microbatches * (equal[0].forward_ns + equal[0].backward_ns)
    work += updates * equal[0].update_ns
    grows = [later - earlier for earlier, later in zip([work, *periods], periods, strict=False)]
    return Losses(work, *grows)


def _mean(stages: tuple[StageCost, ...]) -> StageCost:
    return StageCost(
        forward_ns=round(mean(stage.forward_ns for stage in stages)),
        backward_ns=round(mean(stage.backward_ns for stage in stages)),
        update_ns=round(mean(stage.update_ns for stage in stages)),
    )
