"""From a plan, or from a config alone, to the layout of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twobw.config import Config, ConfigError, ParallelSettings, load_config
from twobw.planner.cluster import load_cluster
from twobw.planner.configuration import Configuration, Training
from twobw.planner.plan import PLANNED_SETTINGS, Plan, load_plan
from twobw.planner.search import find_plans
from twobw.profiler.profile import ModelProfile
from twobw.reports.plan_text import search_text
from twobw.training.machine import local_cluster, num_local_devices
from twobw.training.run_folder import PLAN, PROFILE
from twobw.training.worker import has_outer_launcher

AUTO = "auto"
_WISHES = frozenset({"parallel.shard_optimizer", "parallel.overlap_reduce"})  # `auto` keeps them
_PLAN_AGAIN = "plan again from a profile of this config"
_LARGEST_MICROBATCH = 16  # that `auto` profiles, in samples
_MOST_SIZES = 4  # likewise; each takes seconds


@dataclass(frozen=True, slots=True)
class Planned:
    """A config laid out as a plan says.

    Attributes:
        config: to train with.
        files: to leave in the run's folder, text by name: the plan, and the profile it is from.
    """

    config: Config
    files: dict[str, str] = field(default_factory=dict)


def config_of_plan(path: Path, overrides: Mapping[str, str], plan_file: Path) -> Planned:
    """The config of a file, laid out as a plan in another file says.

    Args:
        path: of the TOML file.
        overrides: of its settings, by dotted name.
        plan_file: what ``twobw plan`` has written.

    Raises:
        ConfigError: the plan is of another model or training than the config, or an override is
            what the plan says.
        OSError: the plan cannot be read.
        PlanError: it is none.
    """
    plan = load_plan(plan_file)
    _check_overrides(overrides, f"--parallel {plan_file}", PLANNED_SETTINGS)
    config = _laid_out(path, overrides, plan, f"--parallel {plan_file}")
    return Planned(config, {PLAN: plan.to_json()})


def choose_plan(
    path: Path,
    overrides: Mapping[str, str],
    config: Config,
    cluster_file: Path | None,
    measure: Callable[[Config, Sequence[int]], ModelProfile],
) -> Planned:
    """Profile a config's model on this machine and lay it out as the best plan says, for this
    machine's devices or those of a described cluster. Prints the plans.

    Args:
        path: of the TOML file.
        overrides: of its settings, by dotted name.
        config: what these give.
        cluster_file: the description; ``None``: this machine.
        measure: profiles a config for microbatch sizes (`twobw.profiler.measure.measure_profile`).

    Raises:
        ClusterError: the description will not do.
        ConfigError: an override is what a plan says.
        ValueError: this is a rank of an outer launcher, or nothing fits.
    """
    if has_outer_launcher():
        raise ValueError(
            f"--parallel {AUTO} starts ranks itself, to profile; under a launcher, run twobw "
            "profile and twobw plan first, and give --parallel PLAN"
        )
    described = None if cluster_file is None else load_cluster(cluster_file)
    _check_overrides(overrides, f"--parallel {AUTO}", PLANNED_SETTINGS - _WISHES)
    num_devices = num_local_devices(config.training.num_threads)
    profile = measure(_on_all(config, num_devices), _sizes(config))
    cluster = described or local_cluster(profile.link, num_devices)
    search = find_plans(profile, cluster, training_of(config))
    sys.stdout.write(search_text(search) + "\n\n")
    if not search.plans:
        raise ValueError(f"no plan for {cluster.name} fits; see above")
    plan = search.plans[0]
    files = {PLAN: plan.to_json(), PROFILE: profile.to_json()}
    return Planned(_laid_out(path, overrides, plan, f"--parallel {AUTO}"), files)


def _on_all(config: Config, num_devices: int) -> Config:
    """With as many ranks as devices, as the profile is to be measured."""
    pp = min(num_devices, config.model.size().list_length)
    parallel = ParallelSettings(pp=pp, dp=num_devices // pp)
    return config.model_copy(update={"parallel": parallel})


def _sizes(config: Config) -> list[int]:
    """Microbatches that the global batch can be cut into."""
    batch = config.training.global_batch_size
    divisors = [n for n in range(1, min(batch, _LARGEST_MICROBATCH) + 1) if batch % n == 0]
    return divisors[-_MOST_SIZES:]


def training_of(config: Config) -> Training:
    """What a plan for a config must keep to."""
    return Training(
        config.training.global_batch_size,
        # either way, updates wait for all stages
        clips=config.training.max_grad_norm > 0 or config.training.on_divergence == "skip",
        lookahead=config.parallel.lookahead > 0,
        shard_optimizer=config.parallel.shard_optimizer,
        overlap_reduce=config.parallel.overlap_reduce,
    )


def configuration_of(config: Config, microbatch_size: int) -> Configuration:
    """The layout that a config has, for microbatches of so many samples."""
    parallel = config.parallel
    return Configuration(
        parallel.pp,
        parallel.dp,
        microbatch_size,
        parallel.num_microbatches,
        parallel.schedule,
        config.training.recompute,  # type: ignore[arg-type]
        parallel.extra_in_flight,
        parallel.update_lag if isinstance(parallel.update_lag, int) else 0,
        parallel.grid.placement,
    )


def _check_overrides(overrides: Mapping[str, str], source: str, names: Collection[str]) -> None:
    """Refuse what a plan says besides.

    Raises:
        ConfigError: an override has one of these names.
    """
    problems = [
        f"--{name} {value}: the plan says it; leave it out, or train without a plan"
        for name, value in overrides.items()
        if name in names
    ]
    if problems:
        raise ConfigError(source, problems)


def _laid_out(path: Path, overrides: Mapping[str, str], plan: Plan, source: str) -> Config:
    settings = plan.settings()
    size = settings.pop("training.global_batch_size")
    config = load_config(path, {**overrides, **settings})
    problems = [
        f"{name} = {ours}, but the plan is for {theirs}; {remedy}"
        for name, ours, theirs, remedy in (
            ("model.name", config.model.name, plan.model, _PLAN_AGAIN),
            ("training.precision", config.training.precision, plan.precision, _PLAN_AGAIN),
            ("optimizer.name", config.optimizer.name, plan.optimizer, _PLAN_AGAIN),
            (
                "training.global_batch_size",
                str(config.training.global_batch_size),
                size,
                f"set --training.global_batch_size {size}, or plan again",
            ),
        )
        if ours != theirs
    ]
    if problems:
        raise ConfigError(source, problems)
    return config
