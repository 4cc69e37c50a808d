"""How much memory: 2BW beside the flush (1F1B) and GPipe, and what the runtime's features cost.

A fresh tree of processes for every configuration. A stage's memory is its process's `ru_maxrss` at
the end less the same after the imports and the start of the process group, before a layer is built.

- Weight-heavy: stages of five 4096 x 4096 linear layers (336 MB), one row a microbatch, plain SGD.
  2BW holds one version more than the flush: the difference should be one stage's weights.
- Activation-heavy: stages of four narrow-wide-narrow layers (8 MB of weights, 135 MB of activations
  a microbatch), m = 8. GPipe stashes m microbatches, 2BW p - s on stage s but a version more:
  the difference is (m - (p - s)) (A/p + a) - W/p, where A/p + a, what
  autograd keeps of one microbatch, is counted in the same process after the measurement.
- Recompute: half as many rows, p = m = 4, 2BW. A stage with n = p - s in flight
  holds n (A/p + a) without, and A/p + n a with `recompute="stage"`. `"layer"` keeps the inputs a'
  of all its l layers, and has the graph of one layer at a time: n l a' + A/(p l). The time is of
  whole batches, drained, in turns, with the C library's allocator left as it is; beside it what one
  forward more would take, (2 F + B) / (F + B), from the timeline of the run without recompute. Of
  four stages on fewer cores the processor's time says more than the clock's.
- Bytes a parameter: Adam, layers of 1024 x 1024, one row a microbatch. What grows with the number
  of layers is told from what does not by measuring stages of 16 and of 40: the slope is beside what
  section 4 states, the rest ("constant") holds temporaries of one layer, code and caches. With
  replicas a bucket is held to one layer here: of the runtime's, of 25 MB, none, one or two live at
  the peak, as it happens, which would show as up to 2 bytes in the slope of layers as few as these.
  Look-ahead adds one fp32 copy of the weights, and in mixed precision a bucket's fp32 weights
  (in the constant) and, where some microbatches are fresh, a 16-bit copy.
- Flat: the peak of one long run of a small tied GPT with clipping, dropout and evaluations. The
  recorder's last 4096 spans, some 1.3 MB, fill up within the first 250 batches.

The C library's allocator keeps freed memory for later, more or less of it by the order of sizes.
So that resident memory is what is held, the children run with a fixed MALLOC_MMAP_THRESHOLD_
(every tensor of 64 KB or more goes back to the system when freed) and MALLOC_TRIM_THRESHOLD_.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import harness
import memory_worker
from harness import CONSOLE, Target
from memory_worker import LongRun, Setup, Usage, Workload

MEGABYTE = 1e6
WEIGHT_HEAVY = Workload(num_layers=5, narrow=4096, wide=0, rows=1, num_microbatches=4)
ACTIVATION_HEAVY = Workload(num_layers=4, narrow=64, wide=4096, rows=1024, num_microbatches=8)
RECOMPUTED = replace(ACTIVATION_HEAVY, rows=512, num_microbatches=4)
MANY_LAYERS = Workload(num_layers=16, narrow=1024, wide=0, rows=1, num_microbatches=4)
MORE_LAYERS = 40
TOLERANCE = 0.05  # of bytes a parameter
LONG_RUN_ENDS = [50, 250, 500]
EVALUATE_EVERY = 25
NUM_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """A row of the table of bytes a parameter: what is stated of a way to train."""

    name: str
    stated: int
    schedule: str
    dp: int
    settings: dict[str, Any]

    def setup(self, num_layers: int) -> Setup:
        """With stages of ``num_layers``."""
        workload = replace(MANY_LAYERS, num_layers=num_layers)
        bucket_bytes = 4 * MANY_LAYERS.narrow**2 if self.dp > 1 else 0
        return Setup(workload, self.schedule, 2, self.dp, "Adam", self.settings, bucket_bytes)


NORM = {"max_grad_norm": 1.0}
BF16 = {"precision": "bf16"}
WAITS = {"overlap_reduce": False}
AHEAD = {"lookahead": 1.0}
CASES = [
    Case("fp32, 1f1b", 16, "1f1b", 1, {}),
    Case("fp32, 2bw", 20, "2bw", 1, {}),
    Case("bf16, 1f1b", 18, "1f1b", 1, BF16),
    Case("bf16, 2bw", 20, "2bw", 1, BF16),
    Case("fp32, 2bw, clipped, overlap_reduce=False", 20, "2bw", 1, {**NORM, **WAITS}),
    Case("fp32, 2bw, clipped", 24, "2bw", 1, NORM),
    Case("bf16, 2bw, clipped", 24, "2bw", 1, {**NORM, **BF16}),
    Case("fp32, paci", 16, "paci", 1, {}),
    Case("fp32, 2bw-fresh", 20, "2bw-fresh", 1, {}),
    Case("fp32, 2bw, look-ahead", 24, "2bw", 1, AHEAD),
    Case("fp32, 2bw-fresh, look-ahead", 24, "2bw-fresh", 1, AHEAD),
    Case("bf16, 2bw, look-ahead", 20, "2bw", 1, {**BF16, **AHEAD}),
    Case("bf16, 2bw-fresh, look-ahead", 22, "2bw-fresh", 1, {**BF16, **AHEAD}),
    Case("fp32, 2bw, flushed start", 20, "2bw", 1, {"flush_batches": 1}),
    Case("fp32, 2bw, dp = 2", 24, "2bw", 2, {}),
    Case("fp32, 2bw, dp = 2, ZeRO-1", 20, "2bw", 2, {"shard_optimizer": True}),
]


def main() -> None:
    """Measure, print, write."""
    parts: dict[str, Callable[[], tuple[object, list[Target]]]] = {
        "weights": compare_weights,
        "activations": compare_activations,
        "recompute": compare_recompute,
        "parameters": count_bytes_a_parameter,
        "flat": run_long,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(parts), default=list(parts), help="default: all")
    add("--json", type=Path, metavar="FILE", help="default: out/memory.json beside this file")
    options = parser.parse_args()
    results, targets = {}, []
    for name in options.parts:
        results[name], reached = parts[name]()
        targets += reached
    harness.report("memory", results, targets, options.json)


def measure(name: str, setup: Setup) -> list[Usage]:
    """Every rank's memory."""
    with setup.team(name) as team:
        return team.call("measure")


def compare_weights() -> tuple[object, list[Target]]:
    """2BW's peak over the flush's, in weights of the stage."""
    usages = {name: measure(name, Setup(WEIGHT_HEAVY, name)) for name in ("1f1b", "2bw")}
    show("weight-heavy, m = 4", usages)
    targets = [
        Target(
            f"weight-heavy, stage {stage}: 2bw's peak over 1f1b's, in stage weights",
            (ours.peak_bytes - flush.peak_bytes) / flush.weight_bytes,
            1.05,
        )
        for stage, (ours, flush) in enumerate(zip(usages["2bw"], usages["1f1b"], strict=True))
    ]
    return as_json(usages), targets


def compare_activations() -> tuple[object, list[Target]]:
    """How far GPipe's peak less 2BW's is from the predicted difference."""
    setups = {name: Setup(ACTIVATION_HEAVY, name) for name in ("gpipe", "2bw")}
    usages = {name: measure(name, setup) for name, setup in setups.items()}
    show("activation-heavy, m = 8", usages)
    targets = []
    for stage, (ours, gpipe) in enumerate(zip(usages["2bw"], usages["gpipe"], strict=True)):
        num_saved = ACTIVATION_HEAVY.num_microbatches - (setups["2bw"].pp - stage)
        predicted = num_saved * gpipe.stash_bytes - gpipe.weight_bytes
        measured = gpipe.peak_bytes - ours.peak_bytes
        what = f"activation-heavy, stage {stage}: gpipe less 2bw is"
        targets.append(agreement(what, measured, predicted))
    return as_json(usages), targets


def compare_recompute() -> tuple[object, list[Target]]:
    """How far what recompute saves is from the prediction; and its time."""
    names = ("none", "layer", "stage")
    setups = {n: Setup(RECOMPUTED, "2bw", pp=4, settings={"recompute": n}) for n in names}
    usages = {name: measure(f"recompute {name}", setup) for name, setup in setups.items()}
    show("recompute, activation-heavy, p = m = 4", usages)
    times = time_recompute(setups)
    targets = []
    for name in names[1:]:
        for stage, (plain, ours) in enumerate(zip(usages["none"], usages[name], strict=True)):
            measured = plain.peak_bytes - ours.peak_bytes
            predicted = predicted_saving(plain, name, num_in_flight=setups[name].pp - stage)
            if predicted > plain.layer_stash_bytes:
                what = f"recompute={name}, stage {stage}: saves"
                targets.append(agreement(what, measured, predicted))
    return {"usages": as_json(usages), **times}, targets


def time_recompute(setups: dict[str, Setup]) -> dict[str, Any]:
    """Seconds a batch, median of a few; and what one forward more would come to."""
    teams = {name: setup.team(name, fixed_allocator=False) for name, setup in setups.items()}
    try:
        turns = [
            {name: team.call("turn", 1) for name, team in teams.items()}
            for _ in range(1 + NUM_ROUNDS)
        ][1:]
        share = teams["none"].call("forward_share")[0]
    finally:
        for team in teams.values():
            team.close()
    rows, results = [], {}
    for name in teams:
        wall = [max(seconds for seconds, _ in turn[name]) for turn in turns]
        processor = [sum(seconds for _, seconds in turn[name]) for turn in turns]
        results[name] = {"batch_seconds": wall, "processor_seconds": processor}
        ratios = (
            median(a / b for a, b in zip(its, results["none"][what], strict=True))
            for what, its in results[name].items()
        )
        rows.append([name, *(f"{n:.2f}" for n in (median(wall), median(processor), *ratios))])
    columns = ["recompute", "s a batch", "processor s, all ranks", "over none", "processor's"]
    title = f"time; a forward more is {1 + share:.2f} here, 1.33 in the paper"
    harness.print_table(title, columns, rows)
    return {"turns": results, "a_forward_more": 1 + share}


def predicted_saving(plain: Usage, recompute: str, num_in_flight: int) -> float:
    """By the formula above, in bytes."""
    n, stash, inputs = num_in_flight, plain.stash_bytes, plain.input_bytes
    if recompute == "stage":
        return n * stash - (stash + (n - 1) * inputs)
    kept = n * RECOMPUTED.num_layers * inputs
    return n * stash - (kept + plain.layer_stash_bytes - inputs)


def count_bytes_a_parameter() -> tuple[object, list[Target]]:
    """Slope and constant of the peak over the number of parameters, for every case."""
    rows, targets, results = [], [], []
    num_parameters = MANY_LAYERS.num_layers * MANY_LAYERS.narrow**2
    more_parameters = MORE_LAYERS * MANY_LAYERS.narrow**2
    for case in CASES:
        few, more = (
            measure(case.name, case.setup(num_layers))
            for num_layers in (MANY_LAYERS.num_layers, MORE_LAYERS)
        )
        slopes = [
            (b.peak_bytes - a.peak_bytes) / (more_parameters - num_parameters)
            for a, b in zip(few, more, strict=True)
        ]
        most = max(slopes)
        constant = max(
            b.peak_bytes - slope * more_parameters for slope, b in zip(slopes, more, strict=True)
        )
        rows.append(
            [
                case.name,
                str(case.stated),
                f"{most:.2f}",
                f"{most - case.stated:+.2f}",
                f"{constant / MEGABYTE:.0f}",
            ]
        )
        what = f"{case.name}: {most:.2f} bytes a parameter beside {case.stated} stated, off by"
        targets.append(Target(what, abs(most / case.stated - 1), TOLERANCE))
        results.append({**asdict(case), "by_rank": slopes, "constant_bytes": constant})
        CONSOLE.print(f"done: {case.name}")
    columns = ["", "stated", "measured, most of the ranks", "difference", "constant MB"]
    harness.print_table("bytes a parameter, Adam, p = 2, m = 4", columns, rows)
    return results, targets


def run_long() -> tuple[object, list[Target]]:
    """The peak after 50 batches and after more."""
    with memory_worker.start("long run", LongRun, 2, {}) as team:
        peaks: list[list[int]] = team.call("peaks", LONG_RUN_ENDS, EVALUATE_EVERY)
    rows = [
        [f"stage {stage}", *(f"{peak / MEGABYTE:.2f}" for peak in its)]
        for stage, its in enumerate(peaks)
    ]
    columns = ["peak MB after batch", *(str(end) for end in LONG_RUN_ENDS)]
    harness.print_table("one long run: gpt-tiny, tied, clipped, evaluated", columns, rows)
    targets = [
        Target(f"stage {stage}: peak after batch 500 over that after 50", its[-1] / its[0], 1.02)
        for stage, its in enumerate(peaks)
    ]
    return {"ends": LONG_RUN_ENDS, "peak_bytes_by_stage": peaks}, targets


def agreement(what: str, measured: float, predicted: float) -> Target:
    """Within 10 %."""
    what = f"{what} {measured / MEGABYTE:.0f} MB, predicted {predicted / MEGABYTE:.0f} MB"
    return Target(f"{what}; relative error", abs(measured / predicted - 1), 0.10)


def show(title: str, usages: dict[str, list[Usage]]) -> None:
    """The table of one workload."""
    rows = [
        [
            f"{name}, stage {stage}",
            *(
                f"{number / MEGABYTE:.1f}"
                for number in (usage.peak_bytes, usage.weight_bytes, usage.stash_bytes)
            ),
        ]
        for name, stages in usages.items()
        for stage, usage in enumerate(stages)
    ]
    columns = ["", "peak MB", "stage's weights MB", "a microbatch's stash MB"]
    harness.print_table(title, columns, rows)


def as_json(usages: dict[str, list[Usage]]) -> dict[str, list[dict[str, float]]]:
    """By name and stage."""
    return {name: [asdict(usage) for usage in stages] for name, stages in usages.items()}


if __name__ == "__main__":
    main()
