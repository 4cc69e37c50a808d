"""`Plan`: one way to train a model on a cluster, with what is predicted of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twobw.core.costs import LinkCost, OverheadCost, PipelineCost, SharedReduction, StageCost
from twobw.core.generators import stage_rule
from twobw.core.memory import StageBytes
from twobw.core.rank_grid import Placement
from twobw.planner.configuration import Configuration, Recompute, known_options

SCHEMA_VERSION: Literal[1] = 1

PLANNED_SETTINGS = frozenset(
    {
        "parallel.pp",
        "parallel.placement",
        "parallel.dp",
        "parallel.schedule",
        "parallel.num_microbatches",
        "parallel.extra_in_flight",
        "parallel.update_lag",
        "parallel.split",
        "parallel.overlap_reduce",
        "parallel.shard_optimizer",
        "training.recompute",
    }
)
"""The settings of a run that a plan chooses, by dotted name."""

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


class PlanError(ValueError):
    """A plan that cannot be read, with every problem found."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StagePlan(_Record):
    """A stage.

    Attributes:
        num_layers: of the model's list of layers.
        forward_ns: as in `StageCost`, like the next four.
        backward_ns: likewise.
        update_ns: likewise.
        reduce_ns: likewise.
        output_bytes: likewise.
        memory: bytes at its peak by kind, as in `twobw.planner.memory.StageMemory`.
    """

    num_layers: Size
    forward_ns: Count
    backward_ns: Count
    update_ns: Count
    reduce_ns: Count
    output_bytes: Count
    memory: dict[str, Count]

    @property
    def memory_bytes(self) -> int:
        """At its peak."""
        return sum(self.memory.values())


class LinkPlan(_Record):
    """A link between two stages, as in `LinkCost`."""

    latency_ns: Count
    bytes_per_second: Annotated[float, Field(gt=0)]


class OverheadPlan(_Record):
    """As in `OverheadCost`."""

    op_ns: Count = 0
    message_ns: Count = 0
    batch_ns: Count = 0


class ReductionPlan(_Record):
    """As in `SharedReduction`."""

    stages: tuple[Count, ...]
    duration_ns: Count


class Alternative(_Record):
    """Another way that the search has looked at.

    Attributes:
        layout: in words, as a `Configuration` gives it.
        schedule: its name.
        samples_per_second: predicted.
        peak_bytes: of the fullest stage; more than a device has where it does not fit.
        is_simulated: whether a simulation predicted the speed, else a closed form.
    """

    layout: str
    schedule: str
    samples_per_second: Annotated[float, Field(gt=0)]
    peak_bytes: Count
    is_simulated: bool


class Plan(_Record):
    """What to run, and what it will cost.

    Attributes:
        schema_version: of this file.
        cost_model: what predicted the time: a simulation, or the paper's closed form.
        model: name of the model's size.
        device: that was profiled.
        cluster: name of the cluster.
        device_memory_bytes: that a device has for training.
        precision: of the profile.
        optimizer: likewise.
        global_batch_size: samples of a batch.
        pp: stages.
        dp: replicas of each.
        microbatch_size: in samples.
        num_microbatches: of a batch.
        schedule: its name.
        options: its options as simulated.
        extra_in_flight: microbatches beyond the usual.
        update_lag: microbatches that updates come later, of ``2bw-fresh``.
        recompute: what is run again for the backward.
        placement: whose devices are neighbours: the replicas of a stage, or the stages of a
            pipeline.
        shard_optimizer: whether optimizer state is spread over replicas.
        overlap_reduce: whether reductions are hidden behind the next batch.
        clips: whether the gradient's norm is taken.
        lookahead: whether old gradients are taken at extrapolated weights.
        batch_ns: time of a batch.
        bubble: part of the devices' time in which they compute nothing, mean over the stages.
        losses: of the best plan, parts of a batch's time by cause, in ns.
        stages: in order.
        links: between them.
        overhead: of every rank.
        reductions: that stages make together.
        alternatives: of the best plan, what it was chosen among, itself included: those simulated
            and, for each number of stages, schedule and recompute, the fastest.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    cost_model: Literal["simulation", "paper"] = "simulation"
    model: str
    device: str
    cluster: str
    device_memory_bytes: Size
    precision: str
    optimizer: str
    global_batch_size: Size
    pp: Size
    dp: Size
    microbatch_size: Size
    num_microbatches: Size
    schedule: str
    options: dict[str, Count] = {}
    extra_in_flight: Count = 0
    update_lag: Count = 0
    recompute: Recompute = "none"
    placement: Placement = "replicas"
    shard_optimizer: bool = False
    overlap_reduce: bool = True
    clips: bool = False
    lookahead: bool = False
    batch_ns: Size
    bubble: Annotated[float, Field(ge=0, le=1)]
    losses: dict[str, float] = {}
    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    links: tuple[LinkPlan, ...]
    overhead: OverheadPlan
    reductions: tuple[ReductionPlan, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @property
    def layout(self) -> str:
        """In words."""
        configuration = Configuration(
            self.pp,
            self.dp,
            self.microbatch_size,
            self.num_microbatches,
            self.schedule,
            self.recompute,
            self.extra_in_flight,
            self.update_lag,
            self.placement,
        )
        return str(configuration)

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(stage.num_layers for stage in self.stages)

    @property
    def samples_per_second(self) -> float:
        """All replicas together."""
        return self.global_batch_size / self.batch_ns * 1e9

    @property
    def peak_bytes(self) -> int:
        """Of the fullest stage."""
        return max(stage.memory_bytes for stage in self.stages)

    def cost(self) -> PipelineCost:
        """For the simulator."""
        stages = [
            StageCost(s.forward_ns, s.backward_ns, s.update_ns, s.reduce_ns, s.output_bytes)
            for s in self.stages
        ]
        links = [LinkCost(0, link.latency_ns, link.bytes_per_second) for link in self.links]
        overhead = OverheadCost(
            self.overhead.op_ns, self.overhead.message_ns, self.overhead.batch_ns
        )
        reductions = [SharedReduction(r.stages, r.duration_ns) for r in self.reductions]
        return PipelineCost.of(self.pp, stages, links, overhead, reductions)

    def stage_bytes(self) -> dict[int, StageBytes]:
        """By stage, for memory over time: what `StagePlan.memory` holds at the peak."""
        return {number: self._stage_bytes(number) for number in range(self.pp)}

    def _stage_bytes(self, number: int) -> StageBytes:
        stage = self.stages[number]
        rule = stage_rule(self.schedule, number, self.pp, self.num_microbatches, **self.options)
        kinds = Counter(stage.memory)
        stash = (kinds["activations"] + kinds["logits"]) // rule.max_in_flight
        gradients = kinds["gradients"] + kinds["second_gradients"]
        held = gradients + kinds["activations"] + kinds["logits"] + kinds["workspace"]
        return StageBytes(
            fixed_bytes=stage.memory_bytes - held,
            gradient_bytes=kinds["gradients"],
            stash_bytes=stash,
            forward_bytes=stash + kinds["workspace"],
            backward_bytes=kinds["workspace"],
        )

    def settings(self) -> dict[str, str]:
        """What a run's config must say, by dotted name: the `PLANNED_SETTINGS`, and the global
        batch that they are for."""
        has_lag = "update_lag" in known_options(self.schedule)
        return {
            "parallel.pp": str(self.pp),
            "parallel.dp": str(self.dp),
            "parallel.placement": self.placement,
            "parallel.schedule": self.schedule,
            "parallel.num_microbatches": str(self.num_microbatches),
            "parallel.extra_in_flight": str(self.extra_in_flight),
            "parallel.update_lag": str(self.update_lag) if has_lag else "measured",
            "parallel.split": str(list(self.split)),
            "parallel.overlap_reduce": str(self.overlap_reduce).lower(),
            "parallel.shard_optimizer": str(self.shard_optimizer).lower(),
            "training.global_batch_size": str(self.global_batch_size),
            "training.recompute": self.recompute,
        }

    def to_json(self) -> str:
        """As readable JSON."""
        return self.model_dump_json(indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes, source: str = "plan") -> Plan:
        """The inverse of `to_json`.

        Args:
            text: the JSON.
            source: where it is from, for messages.

        Raises:
            PlanError: it is not a whole plan of this schema version.
        """
        try:
            return Plan.model_validate_json(text)
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, detail['loc'])) or 'plan'}: {detail['msg']}"
                for detail in error.errors(include_url=False)
            ]
            raise PlanError("\n  ".join([f"{source} is no plan:", *lines])) from error


def load_plan(path: Path) -> Plan:
    """Read a plan from a file.

    Raises:
        OSError: it cannot be read.
        PlanError: it is not a whole plan of this schema version.
    """
    return Plan.from_json(path.read_bytes(), str(path))
