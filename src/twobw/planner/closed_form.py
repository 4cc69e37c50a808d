"""Time of a batch without simulation: what prunes the search, and the paper's own cost model."""

from __future__ import annotations

from dataclasses import dataclass

from twobw.planner.configuration import Configuration


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a closed form is told of a pipeline, in ns.

    Attributes:
        dearest_ns: forward and backward of the dearest stage, for a microbatch.
        whole_ns: of all stages together.
        transfer_ns: of a message from one stage to the next.
        update_ns: of a stage.
        reduce_ns: of a stage's gradients.
    """

    dearest_ns: float
    whole_ns: float
    transfer_ns: float
    update_ns: float
    reduce_ns: float


def estimate_ns(configuration: Configuration, sizes: Sizes, *, overlaps: bool) -> float:
    """Time of a batch in steady state (Narayanan et al., 2021, section 3, with transfers).

    Args:
        configuration: what is chosen.
        sizes: of the pipeline.
        overlaps: whether reductions may be hidden behind the next batch.
    """
    p, m = configuration.pp, configuration.num_microbatches
    around_ns = sizes.whole_ns + 2 * (p - 1) * sizes.transfer_ns
    match configuration.schedule:
        case "no-pipeline":
            return m * around_ns + sizes.update_ns + sizes.reduce_ns
        case "gpipe":
            slot_ns = max(sizes.dearest_ns, 2 * sizes.transfer_ns)
            return around_ns + (m - 1) * slot_ns + sizes.update_ns + sizes.reduce_ns
        case "1f1b":
            slot_ns = _slot_ns(sizes, around_ns, min(p, m))
            return around_ns + (m - 1) * slot_ns + sizes.update_ns + sizes.reduce_ns
        case _:
            slot_ns = _slot_ns(sizes, around_ns, p + configuration.extra_in_flight * (p - 1))
            hidden_ns = max(m - (p - 1), 0) * slot_ns if overlaps else 0.0
            exposed_ns = max(sizes.reduce_ns - hidden_ns, 0)
            return max(m, p - 1) * slot_ns + sizes.update_ns + exposed_ns


def _slot_ns(sizes: Sizes, around_ns: float, in_flight: int) -> float:
    """Between a microbatch and the next: the dearest stage's work, the link's, or what it takes
    to go around with so many in flight."""
    return max(sizes.dearest_ns, sizes.transfer_ns, around_ns / in_flight)


@dataclass(frozen=True, slots=True)
class PaperStage:
    """What the paper's cost model is told of a stage.

    Attributes:
        compute_ns: forward and backward, with recompute, for a microbatch.
        border_bytes: of its input and its output, for a microbatch.
        gradient_bytes: that its replicas sum.
    """

    compute_ns: float
    border_bytes: int
    gradient_bytes: int


def paper_ns(
    stages: list[PaperStage],
    num_microbatches: int,
    *,
    depth_bytes_per_second: float,
    width_bytes_per_second: float,
) -> float:
    """Time of a batch by the paper's cost model (Narayanan et al., 2021, section 4.3): activations
    and gradients are added to the compute, gradients' sums are hidden, nothing fills or drains.

    Args:
        stages: of the pipeline.
        num_microbatches: of a batch.
        depth_bytes_per_second: of the link between stages.
        width_bytes_per_second: of the link between replicas; infinite if there is one.
    """
    slots = [
        max(
            stage.compute_ns + _transfers_ns(stage, len(stages), depth_bytes_per_second),
            stage.gradient_bytes / width_bytes_per_second * 1e9 / num_microbatches,
        )
        for stage in stages
    ]
    return num_microbatches * max(slots)


def _transfers_ns(stage: PaperStage, num_stages: int, bytes_per_second: float) -> float:
    return 2 * stage.border_bytes * (num_stages > 1) / bytes_per_second * 1e9
