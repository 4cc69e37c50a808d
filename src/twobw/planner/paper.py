"""The paper's planner: its closed form and its search, for comparison (Narayanan et al.,
2021, section 4)."""

from __future__ import annotations

from math import inf

from twobw.planner.candidates import Candidates
from twobw.planner.closed_form import PaperStage, paper_ns
from twobw.planner.cluster import ClusterSpec
from twobw.planner.configuration import Configuration, Training
from twobw.planner.costing import pipeline_cost
from twobw.planner.memory import stage_memory
from twobw.planner.partition import split_layers
from twobw.planner.plan import Plan
from twobw.planner.prediction import make_plan
from twobw.profiler.profile import ModelProfile


def find_paper_plans(
    profile: ModelProfile, cluster: ClusterSpec, training: Training, *, top: int = 10
) -> list[Plan]:
    """The fastest plans of the paper's Algorithm 1: every depth and width, microbatch size and
    recompute, by 2BW; what does not fit is left out.

    The paper says nothing of unequal layers, so that stages are those of `split_layers`; and what
    a stage holds is taken from `stage_memory`, since the paper leaves terms out.

    Args:
        profile: of the model.
        cluster: the devices.
        training: what is given.
        top: plans wanted.
    """
    candidates = Candidates(profile, cluster, training, ("2bw",))
    timed: list[tuple[int, int, Configuration, tuple[int, ...]]] = []
    for number, configuration in enumerate(candidates.configurations()):
        if configuration.extra_in_flight or configuration.placement != "replicas":
            continue
        split = tuple(split_layers(candidates.costs_for(configuration), configuration.pp))
        batch_ns = _batch_ns(profile, cluster, training, configuration, split)
        timed.append((batch_ns, number, configuration, split))
    plans: list[Plan] = []
    for batch_ns, _, configuration, split in sorted(timed):
        memory = [
            stage_memory(profile, training, configuration, split, stage)
            for stage in range(configuration.pp)
        ]
        if max(stage.total for stage in memory) > cluster.device_memory_bytes:
            continue
        plans.append(
            make_plan(
                profile,
                cluster,
                training,
                configuration,
                pipeline_cost(profile, cluster, training, configuration, split),
                split=split,
                memory=memory,
                options={},
                batch_ns=batch_ns,
                cost_model="paper",
            )
        )
        if len(plans) == top:
            break
    return plans


def _batch_ns(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: Training,
    configuration: Configuration,
    split: tuple[int, ...],
) -> int:
    cost = pipeline_cost(profile, cluster, training, configuration, split)
    sent = [0, *(stage.output_bytes for stage in cost.stages)]
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    stages = [
        PaperStage(
            compute_ns=stage.forward_ns + stage.backward_ns,
            border_bytes=sent[number] + sent[number + 1],
            gradient_bytes=sum(
                profile.layer(layer).gradient_bytes for layer in range(end - count, end)
            ),
        )
        for number, (stage, end, count) in enumerate(zip(cost.stages, ends, split, strict=True))
    ]
    depth = cluster.link(crosses=configuration.pp > cluster.devices_per_node)
    width = cluster.link(crosses=configuration.dp > cluster.devices_per_node)
    return round(
        paper_ns(
            stages,
            configuration.num_microbatches,
            depth_bytes_per_second=depth.bytes_per_second,
            width_bytes_per_second=width.bytes_per_second if configuration.dp > 1 else inf,
        )
    )
