"""What the planner chooses among, and what it takes as given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from twobw.core.generators import options_of, stage_rule
from twobw.core.generators.rule import StageRule
from twobw.core.rank_grid import Placement
from twobw.profiler.profile import ModelProfile

Recompute = Literal["none", "layer", "stage", "attention"]


@dataclass(frozen=True, slots=True)
class Training:
    """What a plan must keep to.

    Attributes:
        global_batch_size: samples of a batch.
        clips: whether the global norm of the gradient is taken.
        lookahead: whether old gradients are taken at extrapolated weights.
        shard_optimizer: whether optimizer state is spread over the replicas.
        overlap_reduce: whether reductions may be hidden behind the next batch.
    """

    global_batch_size: int
    clips: bool = False
    lookahead: bool = False
    shard_optimizer: bool = False
    overlap_reduce: bool = True


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to train a model on several devices, but for the split of its layers.

    Attributes:
        pp: stages.
        dp: replicas of each.
        microbatch_size: in samples.
        num_microbatches: of a batch, for each replica.
        schedule: its name.
        recompute: what is run again for the backward.
        extra_in_flight: of the schedules around 2BW.
        update_lag: of ``2bw-fresh``.
        placement: whether the replicas of a stage are on neighbouring devices, or the stages of a
            pipeline.
    """

    pp: int
    dp: int
    microbatch_size: int
    num_microbatches: int
    schedule: str
    recompute: Recompute = "none"
    extra_in_flight: int = 0
    update_lag: int = 0
    placement: Placement = "replicas"

    def __str__(self) -> str:
        words = [f"pp={self.pp} dp={self.dp} {self.schedule}"]
        if self.extra_in_flight:
            words.append(f"+{self.extra_in_flight} in flight")
        words.append(f"b={self.microbatch_size} m={self.num_microbatches}")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.placement == "pipelines":
            words.append("pipelines within nodes")
        return " ".join(words)

    def options(self, *, defers: bool) -> dict[str, int]:
        """Of the schedule.

        Args:
            defers: whether updates need other ranks and may come later.
        """
        given = {
            "extra_in_flight": self.extra_in_flight,
            "update_lag": self.update_lag if defers else 0,
            "defer_update": defers,
        }
        known = known_options(self.schedule)
        return {option: value for option, value in given.items() if value and option in known}

    def rule(self, stage: int, *, defers: bool) -> StageRule:
        """The schedule's rule for a stage."""
        options = tuple(self.options(defers=defers).items())
        return _rule(self.schedule, stage, self.pp, self.num_microbatches, options)


@cache
def known_options(schedule: str) -> frozenset[str]:
    """The options that a schedule has."""
    return frozenset(options_of(schedule))


@lru_cache(maxsize=1 << 16)
def _rule(
    schedule: str, stage: int, pp: int, num_microbatches: int, options: tuple[tuple[str, int], ...]
) -> StageRule:
    return stage_rule(schedule, stage, pp, num_microbatches, **dict(options))


def needs_other_ranks(
    profile: ModelProfile, training: Training, configuration: Configuration, split: tuple[int, ...]
) -> bool:
    """Whether the updates of some stage wait for other ranks: replicas, ties, overflow, norm."""
    if configuration.dp > 1 or tied_stages(profile, split):
        return True
    takes_norm = training.clips or profile.precision == "fp16"
    return takes_norm and configuration.pp > 1


def tied_stages(profile: ModelProfile, split: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    """The stages that share a parameter, and how many numbers it has; for each parameter that
    several stages have."""
    stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
    shared = [
        (tuple(sorted({stage_of[layer] for layer in tie.layers})), tie.num_parameters)
        for tie in profile.ties
    ]
    return [(stages, count) for stages, count in shared if len(stages) > 1]


def defers_updates(
    profile: ModelProfile, training: Training, configuration: Configuration, split: tuple[int, ...]
) -> bool:
    """Whether updates come later than their last backward, so that reductions are hidden."""
    return training.overlap_reduce and needs_other_ranks(profile, training, configuration, split)
