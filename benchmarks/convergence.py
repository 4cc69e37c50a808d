"""Time to loss: the flush, plain 2BW and the default, each trained by `twobw train`.

    python benchmarks/convergence.py [--optimizers muon adamw] [--microbatches 2 4] [--seeds 0 1 2]

trains the byte GPT of `convergence.toml` over two processes of one thread each, contestants
alternating, each with what `delay_emulator.py` found best for it (`convergence_choices.json`). A
run that is already in `--runs` is not repeated, so that the benchmark can be interrupted. Losses do
not depend on how busy the machine is, times do: so the time of a batch is measured apart, in short
runs of the schedules in turns (`--rounds`; medians of the rounds' medians), and the curves over
seconds are batches times that, those of a flushed start at the flush's pace. Prints losses and
times, writes JSON and a plot of the validation loss over tokens and over seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from harness import CONSOLE, OUT, Target, one_thread_each, print_table, report, warn_if_busy

CONFIG = Path(__file__).with_name("convergence.toml")
CHOSEN = Path(__file__).with_name("convergence_choices.json")
FLUSH, PLAIN, DEFAULT, LONGER = "1f1b", "2bw", "default", "longer"
BATCH_TOKENS = 16 * 128
PACE_BATCHES, PACE_WARMUP = 60, 10
TIME_LIMITS = {2: 0.75, 4: 0.89}  # of the flush's time, to its final loss


@dataclass(frozen=True)
class Curve:
    """What one run was like.

    Attributes:
        tokens: trained on before each evaluation.
        seconds: of training before each, at the pace measured.
        losses: validation, in nats a byte.
    """

    tokens: list[int]
    seconds: list[float]
    losses: list[float]

    def seconds_to(self, loss: float) -> float | None:
        """When the validation loss first was as low as this, between two evaluations by a straight
        line; None if never."""
        points = list(zip(self.seconds, self.losses, strict=True))
        for (s, above), (t, below) in itertools.pairwise(points):
            if below <= loss:
                return s + (t - s) * (above - loss) / (above - below) if above > loss else s
        return None


@dataclass(frozen=True)
class Run:
    """One run: a contestant's settings, by name."""

    contestant: str
    optimizer: str
    microbatches: int
    seed: int
    batches: int

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in asdict(self).values())

    def settings(self) -> dict[str, Any]:
        chosen = json.loads(CHOSEN.read_text())[self.optimizer][base_of(self.contestant)]
        return {
            "optimizer.name": self.optimizer,
            "parallel.num_microbatches": self.microbatches,
            "training.seed": self.seed,
            "training.num_batches": self.batches,
            **chosen,
        }


def train(name: str, settings: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics: from its folder if it is there whole, else by training."""
    summary = folder / name / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["is_stopped_early"]:
        shutil.rmtree(folder / name, ignore_errors=True)
        arguments = [f"--{setting}={value}" for setting, value in settings.items()]
        arguments += [f"--run.folder={folder}", f"--run.name={name}"]
        command = [sys.executable, "-m", "twobw", "train", str(CONFIG), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    metrics = folder / name / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def curve_of(rows: list[dict[str, Any]], num_flushed: int, pace: float, flush_pace: float) -> Curve:
    """From a run's metrics; paces are seconds a batch."""
    evaluations = [row for row in rows if "validation_loss" in row]
    counts = [row["num_batches"] for row in evaluations]
    return Curve(
        tokens=[count * BATCH_TOKENS for count in counts],
        seconds=[
            min(count, num_flushed) * flush_pace + max(count - num_flushed, 0) * pace
            for count in counts
        ],
        losses=[row["validation_loss"] for row in evaluations],
    )


def measure_paces(options: argparse.Namespace) -> dict[tuple[str, str, int], float]:
    """Seconds a batch by optimizer, contestant and m: medians over rounds in which they take
    turns, without flushed starts and evaluations."""
    seconds: dict[tuple[str, str, int], list[float]] = {}
    quick = {"training.evaluation_batches": 0, "training.evaluate_every": 0}
    for number, optimizer, m, contestant in itertools.product(
        range(options.rounds), options.optimizers, options.microbatches, (FLUSH, PLAIN, DEFAULT)
    ):
        run = Run(contestant, optimizer, m, 0, PACE_BATCHES)
        settings = {**run.settings(), **quick, "parallel.flush_batches": 0}
        rows = train(f"pace-{number}-{run.name}", settings, options.runs)
        times = [BATCH_TOKENS / row["tokens_per_second"] for row in rows[PACE_WARMUP:]]
        seconds.setdefault((optimizer, contestant, m), []).append(median(times))
    return {key: median(times) for key, times in seconds.items()}


def base_of(contestant: str) -> str:
    return DEFAULT if contestant == LONGER else contestant


def summarise(
    curves: dict[Run, Curve],
    paces: dict[tuple[str, str, int], float],
    options: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list[Target]]:
    """A row for each optimizer, m and contestant; and what was asked for."""
    rows, targets = [], []
    for optimizer, m in itertools.product(options.optimizers, options.microbatches):
        of: dict[str, list[Curve]] = {}
        for run, curve in curves.items():
            if (run.optimizer, run.microbatches) == (optimizer, m):
                of.setdefault(run.contestant, []).append(curve)
        flush = mean(curve.losses[-1] for curve in of[FLUSH])
        flush_seconds = mean(curve.seconds[-1] for curve in of[FLUSH])
        for contestant, runs in of.items():
            last = [curve.losses[-1] for curve in runs]
            reached = [seconds for curve in runs if (seconds := curve.seconds_to(flush))]
            rows.append(
                {
                    "optimizer": optimizer,
                    "m": m,
                    "contestant": contestant,
                    "loss": mean(last),
                    "deviation": stdev(last) if len(last) > 1 else 0.0,
                    "over_flush": mean(last) / flush,
                    "batch_seconds": paces[optimizer, base_of(contestant), m],
                    "seconds": mean(curve.seconds[-1] for curve in runs),
                    "num_reached": len(reached),
                    "time_to_flush_loss": mean(reached) / flush_seconds if reached else None,
                }
            )
        default, longer = (
            next(row for row in rows[-len(of) :] if row["contestant"] == name)
            for name in (DEFAULT, LONGER)
        )
        name = f"{optimizer}, m = {m}"
        targets.append(Target(f"{name}: loss over the flush's", default["over_flush"], 1.01))
        times = [row["time_to_flush_loss"] or float("inf") for row in (default, longer)]
        targets.append(Target(f"{name}: time to the flush's loss", min(times), TIME_LIMITS[m]))
    return rows, targets


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "Validation loss after equal tokens, and the time to the flush's",
        ["optimizer", "m", "contestant", "loss", "over flush", "ms a batch", "time to its loss"],
        [
            [
                row["optimizer"],
                str(row["m"]),
                row["contestant"],
                f"{row['loss']:.4f} ± {row['deviation']:.4f}",
                f"{row['over_flush']:.4f}",
                f"{1e3 * row['batch_seconds']:.0f}",
                f"{t:.3f}" if (t := row["time_to_flush_loss"]) else "not reached",
            ]
            for row in rows
        ],
    )


def plot(curves: dict[Run, Curve], path: Path) -> None:
    """Each contestant's validation loss over tokens and over seconds, a panel for each m."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(run.optimizer, run.microbatches) for run in curves})
    figure, axes = pyplot.subplots(
        len(panels), 2, figsize=(10, 3.2 * len(panels)), squeeze=False, layout="constrained"
    )
    for row, panel in zip(axes, panels, strict=True):
        for color, contestant in zip(("C0", "C3", "C2"), (FLUSH, PLAIN, DEFAULT), strict=True):
            for run, curve in curves.items():
                if (run.optimizer, run.microbatches, run.contestant) != (*panel, contestant):
                    continue
                label = contestant if run.seed == min(r.seed for r in curves) else None
                tokens = [count / 1e6 for count in curve.tokens]
                row[0].plot(tokens[1:], curve.losses[1:], color=color, lw=1, label=label)
                row[1].plot(curve.seconds[1:], curve.losses[1:], color=color, lw=1, label=label)
        row[0].set(
            xlabel="million tokens", ylabel="nats a byte", title=f"{panel[0]}, m = {panel[1]}"
        )
        row[1].set(xlabel="seconds", title=f"{panel[0]}, m = {panel[1]}")
        row[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    CONSOLE.print(f"plotted: {path}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--longer", type=float, default=1.05, help="times so many batches, too")
    parser.add_argument("--rounds", type=int, default=5, help="of the measurement of time")
    parser.add_argument("--runs", type=Path, default=OUT / "convergence")
    parser.add_argument("--plot", type=Path, default=OUT / "convergence.svg")
    parser.add_argument("--json", type=Path, help="instead of out/convergence.json")
    options = parser.parse_args()
    warn_if_busy()
    longer = round(options.batches * options.longer)
    contestants = {FLUSH: options.batches, PLAIN: options.batches, DEFAULT: options.batches}
    contestants[LONGER] = longer
    metrics: dict[Run, list[dict[str, Any]]] = {}
    with one_thread_each():
        for seed, optimizer, m in itertools.product(
            options.seeds, options.optimizers, options.microbatches
        ):
            for contestant, batches in contestants.items():
                run = Run(contestant, optimizer, m, seed, batches)
                metrics[run] = train(run.name, run.settings(), options.runs)
                CONSOLE.print(f"{run.name}: {metrics[run][-1]['validation_loss']:.4f}")
        paces = measure_paces(options)
    curves = {
        run: curve_of(
            rows,
            run.settings().get("parallel.flush_batches", 0),
            paces[run.optimizer, base_of(run.contestant), run.microbatches],
            paces[run.optimizer, FLUSH, run.microbatches],
        )
        for run, rows in metrics.items()
    }
    rows, targets = summarise(curves, paces, options)
    show(rows)
    plot(curves, options.plot)
    results = {
        "summary": rows,
        "runs": [
            {**asdict(run), "settings": run.settings(), **asdict(c)} for run, c in curves.items()
        ],
    }
    report("convergence", results, targets, options.json)


if __name__ == "__main__":
    main()
