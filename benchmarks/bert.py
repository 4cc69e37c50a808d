"""BERT: pre-training and fine-tuning by the flush and by the default, beside random weights.

    python benchmarks/bert.py [--seeds 0 1 2] [--default NAME=VALUE ...] [--flush NAME=VALUE ...]

For each seed, the flush and the default each pre-train `configs/bert.toml` over two processes of
one thread, fine-tune `configs/bert_classify.toml` from the weights that come of it, and train the
same classifier from random weights. NAME=VALUE are settings of `twobw train`, as
parallel.schedule=2bw or optimizer.lr=1e-3, for one of the two or, with --both, for both. A run that
has ended in `--runs` is not repeated, so that the benchmark can be interrupted; one that was
stopped on the way begins again. Give another folder for other settings. Prints means and standard
deviations over the seeds, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from harness import CONSOLE, OUT, Target, one_thread_each, print_table, report, warn_if_busy

CONFIGS = Path(__file__).parents[1] / "configs"
FLUSH, DEFAULT = "flush", "default"
PRE_TRAINING, FINE_TUNING, FROM_RANDOM = "pre-training", "fine-tuning", "from-random"
GAIN = 0.10  # of accuracy, asked of pre-training
QUICK = {
    "training.num_batches": "12",
    "training.evaluation_batches": "1",
    "optimizer.warmup_batches": "1",
}


@dataclass(frozen=True)
class Run:
    """One run, and how it ended.

    Attributes:
        contestant: which of the two.
        part: what it trains.
        seed: of weights, data and dropout.
        loss: validation, in nats a masked byte or a snippet.
        accuracy: of classes, in validation.
        seconds: of training.
    """

    contestant: str
    part: str
    seed: int
    loss: float
    accuracy: float | None
    seconds: float


def run_all(contestant: str, seed: int, options: argparse.Namespace) -> Iterator[Run]:
    """The three runs of a contestant."""
    weights = options.runs / name_of(contestant, PRE_TRAINING, seed) / "weights.safetensors"
    for part, config, start in (
        (PRE_TRAINING, "bert.toml", ""),
        (FINE_TUNING, "bert_classify.toml", str(weights)),
        (FROM_RANDOM, "bert_classify.toml", ""),
    ):
        settings = {
            "training.seed": str(seed),
            "model.init_from": start,
            **(QUICK if options.quick else {}),
            **options.both,
            **getattr(options, contestant),
        }
        folder = options.runs / name_of(contestant, part, seed)
        summary = train(CONFIGS / config, folder, settings)
        run = Run(
            contestant,
            part,
            seed,
            summary["validation_loss_end"],
            summary["validation_accuracy_end"],
            summary["train_seconds"],
        )
        accuracy = "" if run.accuracy is None else f", accuracy {run.accuracy:.3f}"
        CONSOLE.print(f"{folder.name}: loss {run.loss:.4f}{accuracy} in {run.seconds:.0f} s")
        yield run


def name_of(contestant: str, part: str, seed: int) -> str:
    return f"{contestant}-{part}-{seed}"


def train(config: Path, folder: Path, settings: dict[str, str]) -> dict[str, Any]:
    """The summary of a run: from its folder if it has ended there, else by training."""
    if not has_ended(folder / "summary.json"):
        shutil.rmtree(folder, ignore_errors=True)  # else the run would get another name
        settings = settings | {"run.folder": str(folder.parent), "run.name": folder.name}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "twobw", "train", str(config), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{folder.name} failed:\n{done.stdout}\n{done.stderr}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def has_ended(path: Path) -> bool:
    """Whether there is a summary, of a run that was not stopped on the way."""
    return path.exists() and not json.loads(path.read_text())["is_stopped_early"]


def summarise(runs: list[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """By contestant and part: mean and standard deviation over the seeds."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for contestant in (FLUSH, DEFAULT):
        for part in (PRE_TRAINING, FINE_TUNING, FROM_RANDOM):
            of = [run for run in runs if (run.contestant, run.part) == (contestant, part)]
            row = {"seconds": mean(run.seconds for run in of)}
            for figure in ("loss", "accuracy"):
                values = [value for run in of if (value := getattr(run, figure)) is not None]
                if values:
                    row[figure] = mean(values)
                    row[f"{figure}_deviation"] = stdev(values) if len(values) > 1 else 0.0
            rows.setdefault(contestant, {})[part] = row
    return rows


def judge(rows: dict[str, dict[str, dict[str, float]]]) -> list[Target]:
    """The default within one standard deviation of the flush; both well above random weights."""
    flush, default = rows[FLUSH], rows[DEFAULT]
    before, after = flush[PRE_TRAINING], flush[FINE_TUNING]
    worst_loss = before["loss"] + before["loss_deviation"]
    least_accuracy = after["accuracy"] - after["accuracy_deviation"]
    targets = [
        Target("the default's pre-training loss", default[PRE_TRAINING]["loss"], worst_loss),
        Target(
            "the default's accuracy",
            default[FINE_TUNING]["accuracy"],
            least_accuracy,
            at_least=True,
        ),
    ]
    for contestant, parts in rows.items():
        gain = parts[FINE_TUNING]["accuracy"] - parts[FROM_RANDOM]["accuracy"]
        what = f"the {contestant}'s accuracy above that from random weights"
        targets.append(Target(what, gain, GAIN, at_least=True))
    return targets


def show(rows: dict[str, dict[str, dict[str, float]]], num_seeds: int) -> None:
    def figure(row: dict[str, float], name: str) -> str:
        return f"{row[name]:.4f} ± {row[f'{name}_deviation']:.4f}" if name in row else ""

    print_table(
        f"Validation, mean ± standard deviation of {num_seeds} seeds",
        ["", "loss", "accuracy", "seconds"],
        [
            [
                f"{contestant}, {part}",
                figure(row, "loss"),
                figure(row, "accuracy"),
                f"{row['seconds']:.0f}",
            ]
            for contestant, parts in rows.items()
            for part, row in parts.items()
        ],
    )


def setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for name in (FLUSH, DEFAULT, "both"):
        add(f"--{name}", type=setting, nargs="+", default=[], metavar="NAME=VALUE")
    add("--runs", type=Path, help="where runs are; default: out/bert beside this file")
    add("--json", type=Path, help="instead of out/bert.json")
    add("--quick", action="store_true", help="one seed, a few batches, elsewhere: does it run?")
    options = parser.parse_args()
    options.flush = {"parallel.schedule": "1f1b", **dict(options.flush)}
    options.default, options.both = dict(options.default), dict(options.both)
    options.runs = options.runs or OUT / "bert"
    if options.quick:
        options.seeds = options.seeds[:1]
        options.runs = Path(tempfile.mkdtemp(prefix="twobw-bert-"))
    warn_if_busy()
    with one_thread_each():
        runs = [
            run
            for seed in options.seeds
            for contestant in (FLUSH, DEFAULT)
            for run in run_all(contestant, seed, options)
        ]
    rows = summarise(runs)
    show(rows, len(options.seeds))
    results = {
        "settings": {name: getattr(options, name) for name in (FLUSH, DEFAULT, "both")},
        "summary": rows,
        "runs": [asdict(run) for run in runs],
    }
    report("bert", results, judge(rows), options.json)


if __name__ == "__main__":
    main()
