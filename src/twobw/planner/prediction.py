"""From a configuration and its split to a `Plan`: what is predicted of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from twobw.core.costs import PipelineCost
from twobw.core.losses import find_losses
from twobw.core.steady import steady_state
from twobw.planner.cluster import ClusterSpec
from twobw.planner.configuration import (
    Configuration,
    Training,
    defers_updates,
    known_options,
)
from twobw.planner.costing import pipeline_cost, reduce_slots
from twobw.planner.memory import StageMemory, stage_memory
from twobw.planner.plan import LinkPlan, OverheadPlan, Plan, ReductionPlan, StagePlan
from twobw.profiler.profile import ModelProfile

_MOST_EVENTS = 3000  # forwards of a batch on all stages that are simulated; beyond, extrapolated


def simulated_ns(
    schedule: str, num_microbatches: int, cost: PipelineCost, options: dict[str, int]
) -> int:
    """Time of a batch in steady state. Of batches of very many microbatches two shorter ones are
    simulated: between them and beyond, each microbatch takes as long."""
    num_stages, m = len(cost.stages), num_microbatches

    def period_ns(count: int) -> float:
        return float(steady_state(schedule, count, cost, **options).period_ns)

    longer = _longest(num_stages)
    if m <= longer:
        return round(period_ns(m))
    shorter = longer // 2
    some, more = period_ns(shorter), period_ns(longer)
    return round(more + (m - longer) * (more - some) / (longer - shorter))


def num_simulated(num_stages: int, num_microbatches: int) -> int:
    """Forwards that `simulated_ns` plays, on all stages."""
    longer = _longest(num_stages)
    played = num_microbatches if num_microbatches <= longer else longer + longer // 2
    return num_stages * played


def _longest(num_stages: int) -> int:
    """Microbatches of the longest batch that is simulated."""
    return max(_MOST_EVENTS // num_stages, 2 * num_stages)


def predict(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: Training,
    configuration: Configuration,
    split: Sequence[int],
) -> Plan:
    """The plan that a configuration is, by simulation. Where updates can come later, they do so by
    as much as their reductions take, whatever ``configuration.update_lag``.

    Args:
        profile: of the model.
        cluster: the devices.
        training: what is given.
        configuration: what is chosen.
        split: layers of each stage.

    Raises:
        ValueError: the microbatch size was not profiled.
    """
    split = tuple(split)
    cost = pipeline_cost(profile, cluster, training, configuration, split)
    defers = defers_updates(profile, training, configuration, split)
    if defers and "update_lag" in known_options(configuration.schedule):
        lag = reduce_slots(cost, configuration.num_microbatches)
        configuration = replace(configuration, update_lag=lag)
    options = configuration.options(defers=defers)
    return make_plan(
        profile,
        cluster,
        training,
        configuration,
        cost,
        split=split,
        memory=[
            stage_memory(profile, training, configuration, split, stage)
            for stage in range(configuration.pp)
        ],
        options=options,
        batch_ns=simulated_ns(
            configuration.schedule, configuration.num_microbatches, cost, options
        ),
    )


def make_plan(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: Training,
    configuration: Configuration,
    cost: PipelineCost,
    *,
    split: Sequence[int],
    memory: Sequence[StageMemory],
    options: dict[str, int],
    batch_ns: int,
    cost_model: Literal["simulation", "paper"] = "simulation",
) -> Plan:
    """Everything that is known of a configuration.

    Args:
        profile: of the model.
        cluster: the devices.
        training: what is given.
        configuration: what is chosen.
        cost: of its pipelines.
        split: layers of each stage.
        memory: of each stage.
        options: of the schedule.
        batch_ns: predicted.
        cost_model: that predicted it.
    """
    busy_ns = sum(
        configuration.num_microbatches * (stage.forward_ns + stage.backward_ns) + stage.update_ns
        for stage in cost.stages
    )
    return Plan(
        cost_model=cost_model,
        model=profile.model,
        device=profile.device,
        cluster=cluster.name,
        device_memory_bytes=cluster.device_memory_bytes,
        precision=profile.precision,
        optimizer=profile.optimizer,
        global_batch_size=training.global_batch_size,
        pp=configuration.pp,
        dp=configuration.dp,
        microbatch_size=configuration.microbatch_size,
        num_microbatches=configuration.num_microbatches,
        schedule=configuration.schedule,
        options=options,
        extra_in_flight=configuration.extra_in_flight,
        update_lag=configuration.update_lag,
        recompute=configuration.recompute,
        placement=configuration.placement,
        shard_optimizer=training.shard_optimizer,
        overlap_reduce=training.overlap_reduce,
        clips=training.clips,
        lookahead=training.lookahead,
        batch_ns=batch_ns,
        bubble=min(max(1 - busy_ns / (configuration.pp * batch_ns), 0.0), 1.0),
        stages=tuple(
            StagePlan(
                num_layers=count,
                forward_ns=stage.forward_ns,
                backward_ns=stage.backward_ns,
                update_ns=stage.update_ns,
                reduce_ns=stage.reduce_ns,
                output_bytes=stage.output_bytes,
                memory=held.by_kind(),
            )
            for count, stage, held in zip(split, cost.stages, memory, strict=True)
        ),
        links=tuple(
            LinkPlan(latency_ns=link.latency_ns, bytes_per_second=link.bytes_per_second)
            for link in cost.links
        ),
        overhead=OverheadPlan(
            op_ns=cost.overhead.op_ns,
            message_ns=cost.overhead.message_ns,
            batch_ns=cost.overhead.batch_ns,
        ),
        reductions=tuple(
            ReductionPlan(stages=reduction.stages, duration_ns=reduction.duration_ns)
            for reduction in cost.reductions
        ),
    )


def with_losses(plan: Plan) -> Plan:
    """A plan that also says where a batch's time goes; unchanged if it is too long to simulate."""
    if plan.pp * plan.num_microbatches > _MOST_EVENTS:
        return plan
    losses = find_losses(plan.schedule, plan.num_microbatches, plan.cost(), **plan.options)
    parts = {"work": losses.work_ns, **losses.by_cause()}
    return plan.model_copy(update={"losses": parts})
