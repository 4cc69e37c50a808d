"""The search of the best plan: pruned by closed form, the best simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from twobw.planner.candidates import SCHEDULES, Candidate, Candidates, least_bytes
from twobw.planner.cluster import ClusterSpec
from twobw.planner.configuration import (
    Configuration,
    Training,
    defers_updates,
    known_options,
)
from twobw.planner.memory import MemoryTable, StageMemory
from twobw.planner.partition import split_layers
from twobw.planner.plan import Alternative, Plan
from twobw.planner.prediction import num_simulated, predict, with_losses
from twobw.planner.units import of_limit
from twobw.profiler.profile import ModelProfile

_LEAST_GAIN = 1e-3  # part of a batch's time that more microbatches in flight must save
_MORE_SIMULATED = 2  # plans than are wanted, since closed forms may order them otherwise
_LEAST_SIMULATED = 12  # however few are wanted
_FEWEST_SIMULATED = 3  # however long that takes
_MOST_FORWARDS = 140_000  # simulated for all plans together; beyond, fewer plans
_MOST_ALTERNATIVES = 200  # that closed forms estimate for a plan's report, the fastest


@dataclass(frozen=True, slots=True)
class Rejection:
    """A configuration that does not fit.

    Attributes:
        configuration: which.
        stage: the fullest one.
        needed_bytes: by it.
        limit_bytes: that a device has.
        speedup: how many times as fast as the best plan it would be, by closed form; 0 where
            there is none.
        is_leanest: whether nothing with this many stages needs less.
    """

    configuration: Configuration
    stage: int
    needed_bytes: int
    limit_bytes: int
    speedup: float = 0.0
    is_leanest: bool = False

    def __str__(self) -> str:
        needs = f"stage {self.stage} needs {of_limit(self.needed_bytes, self.limit_bytes)}"
        what = str(self.configuration).removeprefix(f"pp={self.configuration.pp} ")
        if self.is_leanest:
            return f"pp={self.configuration.pp}: {needs}, even with {what}"
        speedup = f"; {self.speedup:.2f} times as fast" if self.speedup else ""
        return f"pp={self.configuration.pp}: {needs} ({what}{speedup})"


@dataclass(frozen=True, slots=True)
class Search:
    """What came of a search.

    Attributes:
        plans: the best, the fastest first.
        rejections: for each depth without a plan why nothing fits, and for others the fastest
            that does not.
        num_considered: candidates.
        remedies: where nothing fits, the smallest changes that would help.
    """

    plans: list[Plan]
    rejections: list[Rejection]
    num_considered: int
    remedies: list[str] = field(default_factory=list)


def find_plans(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: Training,
    *,
    top: int = 10,
    schedules: Sequence[str] = SCHEDULES,
) -> Search:
    """The fastest ways to train a model on a cluster.

    Args:
        profile: of the model.
        cluster: the devices.
        training: what is given.
        top: plans wanted.
        schedules: to choose among.

    Raises:
        ValueError: no microbatch size that was profiled divides the global batch.
    """
    return _Searcher(profile, cluster, training, schedules).search(top)


def _without_idle_extras(plans: Sequence[Plan]) -> list[Plan]:
    """The fastest first; without those that have more in flight for nothing."""
    fastest: dict[str, float] = {}
    kept = []
    for plan in sorted(plans, key=lambda plan: plan.extra_in_flight):
        usual = plan.model_copy(update={"extra_in_flight": 0}).layout
        if plan.batch_ns < fastest.get(usual, inf) * (1 - _LEAST_GAIN):
            fastest[usual] = plan.batch_ns
            kept.append(plan)
    return sorted(kept, key=lambda plan: plan.batch_ns)


def find_plan(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: Training,
    configuration: Configuration,
) -> Plan | Rejection:
    """One configuration as `find_plans` judges it: with the best split whose stages all fit and,
    where its updates may come later, with the lag that their reductions need; or why it does not
    fit.

    Args:
        profile: of the model.
        cluster: the devices.
        training: what is given.
        configuration: what is chosen.

    Raises:
        ValueError: the microbatch size was not profiled, or there are more stages than layers.
    """
    searcher = _Searcher(profile, cluster, training, (configuration.schedule,))
    return searcher.judge(configuration)


@dataclass(frozen=True, slots=True)
class _Fitting:
    configuration: Configuration
    split: tuple[int, ...]
    estimate_ns: float


class _Searcher:
    def __init__(
        self,
        profile: ModelProfile,
        cluster: ClusterSpec,
        training: Training,
        schedules: Sequence[str],
    ) -> None:
        self._profile, self._cluster, self._training = profile, cluster, training
        self._candidates = Candidates(profile, cluster, training, schedules)
        self._tables: dict[tuple[int, str], MemoryTable] = {}
        self._fits: dict[tuple[object, ...], tuple[int, ...] | Rejection] = {}
        self._limit = cluster.device_memory_bytes

    def judge(self, configuration: Configuration) -> Plan | Rejection:
        split = self._fitting_split(configuration)
        if isinstance(split, Rejection):
            return split
        return self._plan(configuration, split)

    def search(self, top: int) -> Search:
        candidates = self._candidates.all()
        if not candidates:
            sizes = ", ".join(map(str, self._profile.microbatch_sizes))
            raise ValueError(
                f"a global batch of {self._training.global_batch_size} samples cannot be cut into "
                f"microbatches of {sizes}, which were profiled"
            )
        wanted = max(top + _MORE_SIMULATED, _LEAST_SIMULATED)
        fitting, rejected = self._fitting(candidates, wanted)
        plans = _without_idle_extras(self._simulated(fitting))
        if plans:
            alternatives = self._alternatives(candidates, plans)
            plans[0] = with_losses(plans[0]).model_copy(update={"alternatives": alternatives})
        leanest = self._leanest({plan.pp for plan in plans})
        hopeless = {rejection.configuration.pp for rejection in leanest}
        faster = [
            replace(rejection, speedup=plans[0].batch_ns / estimate)
            for rejection, estimate in rejected
            if plans and estimate < plans[0].batch_ns and rejection.configuration.pp not in hopeless
        ]
        rejections = sorted([*leanest, *faster], key=lambda r: r.configuration.pp)
        remedies = [] if plans else self._remedies(leanest)
        return Search(plans[:top], rejections, len(candidates), remedies)

    def _fitting(
        self, candidates: Sequence[Candidate], wanted: int
    ) -> tuple[list[_Fitting], list[tuple[Rejection, float]]]:
        """The best of those that fit, by closed form with their own splits, the best first. The
        candidates' estimates are for the best splits, so that none after the last one looked at
        can be better. And for each depth the fastest that does not fit, with its estimate."""
        found: list[_Fitting] = []
        rejected: dict[int, tuple[Rejection, float]] = {}
        for candidate in candidates:
            if len(found) >= wanted and candidate.estimate_ns >= found[wanted - 1].estimate_ns:
                break
            configuration = candidate.configuration
            split = self._fitting_split(configuration)
            if isinstance(split, Rejection):
                rejected.setdefault(configuration.pp, (split, candidate.estimate_ns))
                continue
            estimate_ns = self._candidates.estimate_ns(configuration, split)
            found.append(_Fitting(configuration, split, estimate_ns))
            found.sort(key=lambda fitting: fitting.estimate_ns)
        return found[:wanted], list(rejected.values())

    def _simulated(self, fitting: Sequence[_Fitting]) -> list[Plan]:
        """Plans of the best, as many as may be simulated."""
        plans: list[Plan] = []
        left = _MOST_FORWARDS
        for found in fitting:
            if left < 0 and len(plans) >= _FEWEST_SIMULATED:
                break
            plans.append(self._plan(found.configuration, found.split))
            left -= num_simulated(found.configuration.pp, found.configuration.num_microbatches)
        return plans

    def _alternatives(
        self, candidates: Sequence[Candidate], plans: Sequence[Plan]
    ) -> tuple[Alternative, ...]:
        """What the best plan is told to have been chosen among (see `Plan`)."""
        known = {plan.layout for plan in plans}
        fastest: dict[tuple[object, ...], Candidate] = {}
        for candidate in candidates:
            c = candidate.configuration
            fastest.setdefault((c.pp, c.schedule, c.recompute), candidate)
        simulated = [
            Alternative(
                layout=plan.layout,
                schedule=plan.schedule,
                samples_per_second=plan.samples_per_second,
                peak_bytes=plan.peak_bytes,
                is_simulated=True,
            )
            for plan in plans
        ]
        others = [found for found in fastest.values() if str(found.configuration) not in known]
        estimated = (self._alternative(found) for found in others[:_MOST_ALTERNATIVES])
        return (*simulated, *estimated)

    def _alternative(self, candidate: Candidate) -> Alternative:
        """By closed form; what does not fit, with the best split of all."""
        configuration, estimate_ns = candidate.configuration, candidate.estimate_ns
        split = self._fitting_split(configuration)
        if isinstance(split, Rejection):
            peak_bytes = split.needed_bytes
        else:
            memory = self._memory(self._with_a_lag(configuration), split)
            peak_bytes = max(stage.total for stage in memory)
            estimate_ns = self._candidates.estimate_ns(configuration, split)
        return Alternative(
            layout=str(configuration),
            schedule=configuration.schedule,
            samples_per_second=self._training.global_batch_size / estimate_ns * 1e9,
            peak_bytes=peak_bytes,
            is_simulated=False,
        )

    def _table(self, configuration: Configuration) -> MemoryTable:
        key = configuration.microbatch_size, configuration.recompute
        if key not in self._tables:
            self._tables[key] = MemoryTable(self._profile, self._training, *key)
        return self._tables[key]

    def _fitting_split(self, configuration: Configuration) -> tuple[int, ...] | Rejection:
        """The best split whose stages all fit; or what does not, in the best one of all."""
        c = configuration
        rule = c.rule(0, defers=False)
        shares = c.dp if self._training.shard_optimizer else 1
        sizes = (c.pp, c.dp > 1, shares, c.microbatch_size, rule.max_in_flight)
        key = (*sizes, c.recompute, c.schedule)
        if key not in self._fits:
            self._fits[key] = self._find_split(configuration)
        found = self._fits[key]
        return found if isinstance(found, tuple) else replace(found, configuration=configuration)

    def _find_split(self, configuration: Configuration) -> tuple[int, ...] | Rejection:
        costs = self._candidates.costs_for(configuration)
        split = tuple(split_layers(costs, configuration.pp))
        configuration = self._with_a_lag(configuration)
        memory = self._memory(configuration, split)
        fullest = max(range(len(split)), key=lambda stage: memory[stage].total)
        if memory[fullest].total <= self._limit:
            return split
        rejection = Rejection(configuration, fullest, memory[fullest].total, self._limit)
        defers = defers_updates(self._profile, self._training, configuration, split)
        table = self._table(configuration)
        try:
            fitting = split_layers(
                costs,
                configuration.pp,
                lambda stage: table.totals(configuration, stage, defers=defers) <= self._limit,
            )
        except ValueError:
            return rejection
        return tuple(fitting)

    @staticmethod
    def _with_a_lag(configuration: Configuration) -> Configuration:
        """If the schedule knows one: any needs a second gradient."""
        if "update_lag" in known_options(configuration.schedule):
            return replace(configuration, update_lag=1)
        return configuration

    def _memory(self, configuration: Configuration, split: tuple[int, ...]) -> list[StageMemory]:
        table = self._table(configuration)
        defers = defers_updates(self._profile, self._training, configuration, split)
        ends = [sum(split[: stage + 1]) for stage in range(len(split))]
        return [
            table.stage(configuration, stage, end - count, end, defers=defers)
            for stage, (end, count) in enumerate(zip(ends, split, strict=True))
        ]

    def _plan(self, configuration: Configuration, split: tuple[int, ...]) -> Plan:
        """Simulated."""
        return predict(self._profile, self._cluster, self._training, configuration, split)

    def _leanest(self, depths_with_plan: set[int]) -> list[Rejection]:
        """For each depth that is too shallow, what needs least."""
        found: list[Rejection] = []
        for pp in range(1, min(self._profile.num_layers, self._cluster.num_devices) + 1):
            rejection = None if pp in depths_with_plan else self._leanest_of(pp)
            if rejection is not None and rejection.needed_bytes <= self._limit:
                break
            if rejection is not None:
                found.append(rejection)
        return found

    def _leanest_of(self, pp: int, dp: int | None = None) -> Rejection | None:
        """What needs least at a depth: at the smallest microbatch size, with as few replicas as
        are looked at."""
        size = self._profile.microbatch_sizes[0]
        widths = self._candidates.widths(pp, size)
        if dp is not None:
            widths = [(dp, self._training.global_batch_size // (dp * size))]
        found = [
            self._least(Configuration(pp, widths[-1][0], size, widths[-1][1], schedule, recompute))
            for recompute in self._candidates.recomputes
            for schedule in self._candidates.leanest_schedules(pp)
            if widths
        ]
        return min(found, key=lambda rejection: rejection.needed_bytes, default=None)

    def _least(self, configuration: Configuration) -> Rejection:
        """By the split whose fullest stage is the least full, and the best of those."""
        table, stages = self._table(configuration), range(configuration.pp)
        totals = [table.totals(configuration, stage, defers=False) for stage in stages]
        needed = least_bytes(totals)
        costs = self._candidates.costs_for(configuration)
        split = split_layers(costs, configuration.pp, lambda stage: totals[stage] <= needed)
        ends = [sum(split[: stage + 1]) for stage in stages]
        held = [totals[stage][ends[stage] - split[stage], ends[stage]] for stage in stages]
        return Rejection(configuration, held.index(max(held)), needed, self._limit, is_leanest=True)

    def _remedies(self, leanest: Sequence[Rejection]) -> list[str]:
        """The smallest changes after which something would fit."""
        least = min(leanest, key=lambda rejection: rejection.needed_bytes)
        remedies = [
            f"devices with {of_limit(least.needed_bytes, self._limit, 'for training instead of')}: "
            f"{least.configuration}"
        ]
        for pp in range(self._cluster.num_devices + 1, self._profile.num_layers + 1):
            deeper = self._leanest_of(pp, dp=1)
            if deeper is not None and deeper.needed_bytes <= self._limit:
                remedies.append(
                    f"{pp} devices instead of {self._cluster.num_devices}: {deeper.configuration}"
                )
                break
        return remedies
