"""How far predictions are off: time a batch and peak memory, measured beside predicted.

Two parts, configuration by configuration:

- Two stages of one thread each train a GPT (width 256, 8 blocks, sequences of 128 bytes, AdamW,
  fp32). Profile and run are taken in the same go, since a machine drifts: the same two processes
  profile the layers for a second, then train some batches, and so on by turns. The profile of all
  turns gives the prediction; of the turns' times a batch the median counts.
- Four and eight stages of layers that sleep for a set time, some with delayed links, for schedules
  on more stages than there are cores: the sleeps are timed in the same way. Time only.

Memory is measured in processes of its own, made for one configuration: the most that was resident,
less what was there before the model. So that resident memory is what is held, they run with a
fixed malloc threshold (see `memory.py`). Of the two stages the error that is larger counts.

"others" is what else ran on the machine meanwhile, in cores: with two stages on two cores numbers
are worth something only where it is near zero.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import harness
import memory_worker
from harness import CONSOLE, Target, Team
from prediction_worker import Emulated, EmulatedRank, MemoryRank, Rank, microbatch_size

from twobw.config import Config, load_config
from twobw.core.steady import steady_state
from twobw.planner.cluster import ClusterSpec
from twobw.planner.configuration import Configuration, Training
from twobw.planner.plan import Plan
from twobw.planner.prediction import predict
from twobw.profiler.profile import LinkProfile, ModelProfile

CONFIG = Path(__file__).parents[1] / "configs/demo.toml"
MODEL = "gpt-bench"
NUM_STAGES = 2
TURN_SECONDS = 2.0


@dataclass(frozen=True)
class Case:
    """A configuration of the GPT on two stages."""

    schedule: str
    microbatch_size: int
    num_microbatches: int
    split: tuple[int, int] = (5, 5)
    recompute: str = "none"

    def config(self) -> Config:
        """What trains it."""
        settings = {
            "model.name": MODEL,
            "parallel.schedule": self.schedule,
            "parallel.num_microbatches": str(self.num_microbatches),
            "parallel.split": str(list(self.split)),
            "training.global_batch_size": str(self.microbatch_size * self.num_microbatches),
            "training.recompute": self.recompute,
        }
        return load_config(CONFIG, settings)

    def __str__(self) -> str:
        again = "" if self.recompute == "none" else f", recompute {self.recompute}"
        layers = "+".join(map(str, self.split))
        b, m = self.microbatch_size, self.num_microbatches
        return f"{self.schedule}, b={b} m={m}, layers {layers}{again}"


CASES = [
    Case("2bw", 4, 2),
    Case("2bw", 4, 4),
    Case("2bw", 4, 8),
    Case("2bw", 1, 8),
    Case("2bw", 2, 4, (6, 4)),
    Case("2bw", 4, 4, (7, 3)),
    Case("2bw", 4, 4, recompute="layer"),
    Case("2bw-fresh", 4, 4),
    Case("1f1b", 4, 2),
    Case("1f1b", 4, 4),
    Case("1f1b", 2, 8),
    Case("1f1b", 1, 4),
    Case("1f1b", 4, 4, (3, 7)),
    Case("1f1b", 4, 4, recompute="stage"),
    Case("gpipe", 4, 2),
    Case("gpipe", 4, 4),
    Case("gpipe", 2, 8),
    Case("gpipe", 4, 4, (4, 6), recompute="layer"),
]

LAYER_SECONDS = 0.03
SLOT_SECONDS = 3 * LAYER_SECONDS
EMULATED = [
    Emulated("2bw", (1,) * 4, 4, LAYER_SECONDS),
    Emulated("2bw", (1, 2, 1, 1), 8, LAYER_SECONDS),
    Emulated("2bw", (1,) * 4, 8, LAYER_SECONDS, delay_seconds=0.2 * SLOT_SECONDS),
    Emulated("2bw", (1,) * 4, 8, LAYER_SECONDS, 0.4 * SLOT_SECONDS, extra_in_flight=1),
    Emulated("1f1b", (2, 1, 1, 1), 8, LAYER_SECONDS, delay_seconds=0.1 * SLOT_SECONDS),
    Emulated("gpipe", (1,) * 4, 4, LAYER_SECONDS),
    Emulated("2bw", (1,) * 8, 16, LAYER_SECONDS),
    Emulated("1f1b", (1,) * 8, 8, LAYER_SECONDS),
    Emulated("2bw", (1,) * 8, 16, LAYER_SECONDS, delay_seconds=0.1 * SLOT_SECONDS),
]


@dataclass(frozen=True)
class Outcome:
    """A configuration's figures.

    Attributes:
        name: of it.
        measured_seconds: a batch, the median of the turns.
        predicted_seconds: likewise.
        turn_seconds: a batch in each turn.
        measured_bytes: at the peak, by stage; empty where only time counts.
        predicted_bytes: likewise.
        other_cores: used by other programs meanwhile; ``None`` where that is not known.
    """

    name: str
    measured_seconds: float
    predicted_seconds: float
    turn_seconds: list[float]
    measured_bytes: list[int]
    predicted_bytes: list[int]
    other_cores: float | None

    @property
    def time_error(self) -> float:
        """Of the prediction, relative to what was measured; above 0 it was slower than that."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Likewise; of the stage where it is larger."""
        pairs = zip(self.predicted_bytes, self.measured_bytes, strict=True)
        return max((p / m - 1 for p, m in pairs), key=abs, default=None)


def main() -> None:
    """Measure, print, write."""
    options = parse()
    harness.warn_if_busy()
    outcomes = []
    if "real" in options.parts:
        outcomes += run_real(options.cases or CASES, options.rounds)
    if "emulated" in options.parts:
        outcomes += run_emulated(options.rounds)
    columns = ["", "s a batch", "predicted", "error", "peak MB", "predicted", "error", "others"]
    harness.print_table("measured and predicted", columns, [row(outcome) for outcome in outcomes])
    results = [asdict(outcome) for outcome in outcomes]
    harness.report("prediction", results, judge(outcomes), options.json)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    parts = ["real", "emulated"]
    add("--parts", nargs="+", choices=parts, default=parts, help="default: both")
    add("--cases", type=case_of, nargs="+", metavar="N", help="of the real ones, by number from 1")
    add("--rounds", type=int, default=5, help="turns of each configuration (default 5)")
    add("--json", type=Path, metavar="FILE", help="default: out/prediction.json beside this file")
    return parser.parse_args()


def case_of(number: str) -> Case:
    """One of the real cases."""
    return CASES[int(number) - 1]


def run_real(cases: list[Case], num_rounds: int) -> list[Outcome]:
    """Every configuration of the GPT."""
    outcomes = []
    with (
        harness.one_thread_each(),
        Team("prediction", Rank, NUM_STAGES, {"config": cases[0].config()}) as team,
    ):
        team.wait_until_built()
        for case in cases:
            config = case.config()
            team.call("begin", config)
            turns, others = turns_of(team, num_rounds)
            profile = ModelProfile.from_json(team.call("end")[0])
            plan = predicted(profile, config)
            outcomes.append(
                Outcome(
                    str(case),
                    median(turns),
                    plan.batch_ns / 1e9,
                    turns,
                    measure_memory(config),
                    [stage.memory_bytes for stage in plan.stages],
                    others,
                )
            )
            CONSOLE.print("  ".join(row(outcomes[-1])))
    return outcomes


def turns_of(team: Team, num_rounds: int) -> tuple[list[float], float | None]:
    """Seconds a batch in each turn, and what other programs used meanwhile, in cores."""
    first = mean(team.call("turn", 1, 1))
    num_timed = max(2, round(TURN_SECONDS / first))
    before, start = harness.machine_cpu_seconds(), time.monotonic()
    own = sum(team.call("cpu_seconds"))
    turns = [mean(team.call("turn", 2, num_timed)) for _ in range(num_rounds)]
    after = harness.machine_cpu_seconds()
    if before is None or after is None:
        return turns, None
    used = sum(team.call("cpu_seconds")) - own
    return turns, max(after - before - used, 0.0) / (time.monotonic() - start)


def predicted(profile: ModelProfile, config: Config) -> Plan:
    """The plan that a config is."""
    parallel = config.parallel
    configuration = Configuration(
        parallel.pp,
        parallel.dp,
        microbatch_size(config),
        parallel.num_microbatches,
        parallel.schedule,
        config.training.recompute,  # type: ignore[arg-type]
        parallel.extra_in_flight,
    )
    training = Training(config.training.global_batch_size, clips=config.training.max_grad_norm > 0)
    return predict(profile, cluster_of(profile), training, configuration, parallel.split)


def cluster_of(profile: ModelProfile) -> ClusterSpec:
    """This machine, as the planner knows it."""
    return ClusterSpec(
        name="this machine",
        devices_per_node=profile.num_ranks,
        device_memory_bytes=1 << 40,
        inside=profile.link or LinkProfile(latency_ns=0, bytes_per_second=10**12),
    )


def measure_memory(config: Config) -> list[int]:
    """Bytes at the peak, by stage."""
    tiny = {"model.name": "gpt-tiny", "parallel.num_microbatches": "2"}
    arguments = {"config": config, "tiny": load_config(CONFIG, tiny)}
    with memory_worker.start("memory", MemoryRank, config.num_ranks, arguments) as team:
        return team.call("peak")


def run_emulated(num_rounds: int) -> list[Outcome]:
    """Every configuration of layers that sleep."""
    outcomes = []
    for run in EMULATED:
        num_stages = len(run.split)
        config = load_config(CONFIG, {"parallel.pp": str(num_stages), "model.num_layers": "6"})
        with (
            harness.one_thread_each(),
            Team(str(run), EmulatedRank, num_stages, {"run": run, "config": config}) as team,
        ):
            team.wait_until_built()
            turns, others = turns_of(team, num_rounds)
            cost = team.call("end")[0]
        options = {"extra_in_flight": run.extra_in_flight} if run.extra_in_flight else {}
        state = steady_state(run.schedule, run.num_microbatches, cost, **options)
        seconds = float(state.period_ns) / 1e9
        outcome = Outcome(name_of(run), median(turns), seconds, turns, [], [], others)
        outcomes.append(outcome)
        CONSOLE.print("  ".join(row(outcome)))
    return outcomes


def name_of(run: Emulated) -> str:
    """For the table."""
    name = f"{run.schedule}, p={len(run.split)} m={run.num_microbatches}"
    if len(set(run.split)) > 1:
        name += f", layers {'+'.join(map(str, run.split))}"
    if run.delay_seconds:
        name += f", links {run.delay_seconds / SLOT_SECONDS:.1f} of a slot"
    return f"{name}, {run.extra_in_flight} extra" if run.extra_in_flight else name


def row(outcome: Outcome) -> list[str]:
    """Of the table."""
    memory = ["", "", ""]
    if outcome.memory_error is not None:
        measured, expected = (
            "/".join(f"{number / 1e6:.0f}" for number in numbers)
            for numbers in (outcome.measured_bytes, outcome.predicted_bytes)
        )
        memory = [measured, expected, f"{outcome.memory_error:+.1%}"]
    others = "" if outcome.other_cores is None else f"{outcome.other_cores:.2f}"
    times = (f"{outcome.measured_seconds:.3f}", f"{outcome.predicted_seconds:.3f}")
    return [outcome.name, *times, f"{outcome.time_error:+.1%}", *memory, others]


def judge(outcomes: list[Outcome]) -> list[Target]:
    """What was asked for."""
    times = [abs(outcome.time_error) for outcome in outcomes]
    memories = [abs(outcome.memory_error) for outcome in outcomes if outcome.memory_error]
    targets = [
        Target(f"error of time a batch, median of {len(times)}", median(times), 0.03),
        Target("error of time a batch, worst", max(times), 0.08),
    ]
    if memories:
        targets += [
            Target(f"error of peak memory, median of {len(memories)}", median(memories), 0.05),
            Target("error of peak memory, worst", max(memories), 0.10),
        ]
    return targets


if __name__ == "__main__":
    main()
