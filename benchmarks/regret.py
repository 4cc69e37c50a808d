"""How good the planner's choice is: every way to train a small GPT on two cores, run for real.

The space: one stage with two replicas, and two stages; microbatches of 1, 2 and 4 samples; 2BW, the
flush and GPipe; nothing run again, or each layer; the split that the planner takes for each. All of
them live in the same two processes, which profile the layers first, and take turns in an order that
rotates; of a configuration's turns the median counts. Regret is the time a batch of the planner's
pick over that of the best that was measured.

The planner is asked four times, each time with devices that have too little memory for what it has
chosen before; the best measured is then that of those that are predicted to fit.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import harness
from harness import CONSOLE, Target, Team
from prediction import CONFIG, cluster_of
from prediction_worker import Contest

from twobw.config import Config, load_config
from twobw.planner.candidates import Candidates
from twobw.planner.cluster import ClusterSpec
from twobw.planner.configuration import Training
from twobw.planner.partition import split_layers
from twobw.planner.plan import Plan
from twobw.planner.prediction import predict
from twobw.planner.search import find_plans
from twobw.profiler.profile import ModelProfile

MODEL = {"model.name": "gpt-bench", "model.num_layers": "4"}
GLOBAL_BATCH_SIZE = 8
MICROBATCH_SIZES = [1, 2, 4]
SCHEDULES = ("2bw", "1f1b", "gpipe")
RECOMPUTES = ("none", "layer")
NUM_RANKS = 2
NUM_QUESTIONS = 4
TURN_SECONDS = 1.5
LIMIT = 1.03


@dataclass(frozen=True)
class Entry:
    """A configuration: what is predicted of it, and the seconds a batch in each of its turns."""

    plan: Plan
    turns: list[float]

    @property
    def seconds(self) -> float:
        """A batch, as measured."""
        return median(self.turns)


def main() -> None:
    """Measure, choose, print, write."""
    options = parse()
    harness.warn_if_busy()
    with (
        harness.one_thread_each(),
        Team("regret", Contest, NUM_RANKS, {"config": config_of({})}, timeout=600.0) as team,
    ):
        team.wait_until_built()
        profile = ModelProfile.from_json(team.call("profile", config_of({}), MICROBATCH_SIZES)[0])
        plans = space(profile)
        turns = measure(team, plans, options.rounds)
    entries = [Entry(plan, turns[plan.layout]) for plan in plans]
    targets = ask(profile, entries)
    show(entries)
    results = [
        {"layout": e.plan.layout, "predicted_seconds": e.plan.batch_ns / 1e9, "turns": e.turns}
        for e in entries
    ]
    harness.report("regret", results, targets, options.json)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="turns of each configuration (default 5)")
    add("--json", type=Path, metavar="FILE", help="default: out/regret.json beside this file")
    return parser.parse_args()


def config_of(settings: dict[str, str]) -> Config:
    """Of the model, with these settings."""
    batch = {"training.global_batch_size": str(GLOBAL_BATCH_SIZE)}
    return load_config(CONFIG, {**MODEL, **batch, **settings})


def space(profile: ModelProfile) -> list[Plan]:
    """Every configuration on both cores, with what is predicted of it."""
    cluster, training = cluster_of(profile), Training(GLOBAL_BATCH_SIZE)
    candidates = Candidates(profile, cluster, training, SCHEDULES)
    return [
        predict(
            profile,
            cluster,
            training,
            configuration,
            split_layers(candidates.costs_for(configuration), configuration.pp),
        )
        for configuration in candidates.configurations()
        if configuration.pp * configuration.dp == NUM_RANKS
        and configuration.recompute in RECOMPUTES
        and not configuration.extra_in_flight
    ]


def measure(team: Team, plans: list[Plan], num_rounds: int) -> dict[str, list[float]]:
    """Seconds a batch in each turn of each configuration, by its layout."""
    num_timed = {}
    for plan in plans:
        team.call("add", plan.layout, config_of(plan.settings()))
        first = mean(team.call("turn", plan.layout, 1, 1))
        num_timed[plan.layout] = max(2, round(TURN_SECONDS / first))
    turns: dict[str, list[float]] = {plan.layout: [] for plan in plans}
    for number in range(num_rounds):
        shift = number * len(plans) // num_rounds
        for plan in plans[shift:] + plans[:shift]:
            seconds = team.call("turn", plan.layout, 2, num_timed[plan.layout])
            turns[plan.layout].append(mean(seconds))
        CONSOLE.print(f"round {number + 1} of {num_rounds}")
    return turns


def ask(profile: ModelProfile, entries: list[Entry]) -> list[Target]:
    """The planner's picks beside the best."""
    by_layout = {entry.plan.layout: entry for entry in entries}
    targets: list[Target] = []
    cluster = cluster_of(profile)
    for _ in range(NUM_QUESTIONS):
        pick = by_layout[choose(profile, cluster).layout]
        fitting = [e for e in entries if e.plan.peak_bytes <= cluster.device_memory_bytes]
        best = min(fitting, key=lambda entry: entry.seconds)
        limit = cluster.device_memory_bytes / 1e6
        where = f"devices of {limit:.0f} MB" if targets else "no limit"
        what = f"{where}: {pick.plan.layout} picked, {best.plan.layout} best of {len(fitting)}"
        targets.append(Target(f"{what}; time over the best's", pick.seconds / best.seconds, LIMIT))
        memory = {"device_memory_bytes": pick.plan.peak_bytes - 1}
        cluster = cluster.model_copy(update=memory)
    return targets


def choose(profile: ModelProfile, cluster: ClusterSpec) -> Plan:
    """The planner's pick out of the space."""
    training = Training(GLOBAL_BATCH_SIZE)
    plans = find_plans(profile, cluster, training, top=50, schedules=SCHEDULES).plans
    return next(
        plan
        for plan in plans
        if plan.recompute in RECOMPUTES and not plan.extra_in_flight and plan.pp * plan.dp == 2
    )


def show(entries: list[Entry]) -> None:
    """The table, the fastest first."""
    rows = []
    for entry in sorted(entries, key=lambda entry: entry.seconds):
        predicted = entry.plan.batch_ns / 1e9
        numbers = (f"{entry.seconds:.3f}", f"{predicted:.3f}")
        error = f"{predicted / entry.seconds - 1:+.1%}"
        rows.append([entry.plan.layout, *numbers, error, f"{entry.plan.peak_bytes / 1e6:.0f}"])
    columns = ["", "s a batch", "predicted", "error", "predicted peak MB"]
    harness.print_table(f"batches of {GLOBAL_BATCH_SIZE}, as measured", columns, rows)


if __name__ == "__main__":
    main()
