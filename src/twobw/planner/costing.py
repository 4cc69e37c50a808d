"""From a profile, a cluster and a configuration to what the simulator needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from twobw.core.costs import OverheadCost, PipelineCost, SharedReduction, StageCost
from twobw.planner.cluster import ClusterSpec
from twobw.planner.configuration import Configuration, Training, tied_stages
from twobw.planner.placement import Surroundings, group_link, surroundings
from twobw.profiler.profile import LayerProfile, ModelProfile


def layer_ns(layer: LayerProfile, microbatch_size: int, *, recomputes: bool) -> tuple[int, int]:
    """Forward and backward of a layer, what is run again for it in the backward.

    Raises:
        ValueError: the microbatch size was not profiled.
    """
    costs = layer.at(microbatch_size)
    return costs.forward_ns, costs.backward_ns + (costs.recompute_ns if recomputes else 0)


def pipeline_cost(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: Training,
    configuration: Configuration,
    split: Sequence[int],
) -> PipelineCost:
    """The costs of one of the pipelines.

    Raises:
        ValueError: the microbatch size was not profiled.
    """
    split = tuple(split)
    where = surroundings(cluster, configuration.pp, configuration.dp, configuration.placement)
    firsts = [sum(split[:stage]) for stage in range(len(split))]
    stages = [
        _stage_cost(profile, training, configuration, where, stage, first, first + count)
        for stage, (first, count) in enumerate(zip(firsts, split, strict=True))
    ]
    overhead = profile.overhead
    return PipelineCost.of(
        configuration.pp,
        stages,
        where.links,
        OverheadCost(overhead.op_ns, overhead.message_ns, overhead.batch_ns),
        _shared_reductions(profile, cluster, training, configuration, split, where),
    )


def reduce_slots(cost: PipelineCost, num_microbatches: int) -> int:
    """Microbatch slots that the slowest stage's reductions take, as a run would measure them in
    flushed batches; at most all. In what stages reduce together a stage waits for those before
    it, whose last backward comes later."""
    later = [
        stage.backward_ns + link.occupied_ns(stage.output_bytes) + link.latency_ns
        for stage, link in zip(cost.stages[:-1], cost.links, strict=True)
    ]
    slots = []
    for number, stage in enumerate(cost.stages):
        takes_ns = stage.reduce_ns
        for reduction in cost.reductions:
            if number in reduction.stages:
                waits_ns = sum(later[min(reduction.stages) : number])
                takes_ns = max(takes_ns, waits_ns + stage.reduce_ns) + reduction.duration_ns
        slots.append(ceil(takes_ns / max(stage.forward_ns + stage.backward_ns, 1)))
    return min(max(slots), num_microbatches)


def _stage_cost(
    profile: ModelProfile,
    training: Training,
    configuration: Configuration,
    where: Surroundings,
    stage: int,
    first: int,
    end: int,
) -> StageCost:
    size = configuration.microbatch_size
    recomputes = configuration.recompute in ("layer", "stage")
    layers = [profile.layer(index) for index in range(first, end)]
    times = [layer_ns(layer, size, recomputes=recomputes) for layer in layers]
    if end == profile.num_layers:
        times.append(layer_ns(profile.loss, size, recomputes=False))
    ring = where.rings[stage]
    return StageCost(
        forward_ns=sum(forward for forward, _ in times),
        backward_ns=sum(backward for _, backward in times),
        update_ns=_update_ns(layers, training, configuration, where, stage),
        reduce_ns=ring.all_reduce_ns(sum(layer.gradient_bytes for layer in layers)),
        output_bytes=layers[-1].at(size).output_bytes if end < profile.num_layers else 0,
    )


def _update_ns(
    layers: Sequence[LayerProfile],
    training: Training,
    configuration: Configuration,
    where: Surroundings,
    stage: int,
) -> int:
    """With the copy of the newest weights where there is more than one version, and what replicas
    that each have a share of the optimizer send each other."""
    update = sum(layer.update_ns for layer in layers)
    if training.shard_optimizer and configuration.dp > 1:
        weights = sum(layer.gradient_bytes for layer in layers)
        update = update // configuration.dp + where.rings[stage].broadcast_ns(weights)
    if configuration.rule(stage, defers=False).num_versions > 1:
        update += sum(layer.version_copy_ns for layer in layers)
    return update


def _shared_reductions(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: Training,
    configuration: Configuration,
    split: tuple[int, ...],
    where: Surroundings,
) -> list[SharedReduction]:
    """Tied parameters, then the norm or the look for overflow, which cost their latency."""
    ties = [
        SharedReduction(stages, group_link(cluster, stages, where).all_reduce_ns(4 * count))
        for stages, count in tied_stages(profile, split)
    ]
    if configuration.pp > 1 and (training.clips or profile.precision == "fp16"):
        everyone = tuple(range(configuration.pp))
        norm_ns = group_link(cluster, everyone, where).all_reduce_ns(0)
        ties.append(SharedReduction(everyone, norm_ns))
    return ties
