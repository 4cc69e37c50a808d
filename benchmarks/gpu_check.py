"""On one GPU: is it exact, how much memory, how fast. The stages are threads of this process, since
NCCL allows one rank a GPU.

- Exactness: weights after some batches beside a plain loop on the same GPU, in which batch k of 2BW
  runs on W(k-1), the flush's on W(k). With fp32 throughout (no TF32) what is left is the order in
  which atomic additions sum an embedding's gradient, and a tied gradient's two halves. Dropout has
  no plain reference: there other depths and recompute must give what one stage gives.
- Memory: `torch.cuda.max_memory_allocated` of the whole process. 2BW on a weight-heavy model should
  take one copy of the weights more than the flush; and Adam's bytes a parameter are, as in
  `memory.py`, the slope between a small and a larger model. The optimizer is `foreach=False`:
  torch's default on GPUs holds temporaries of several parameters at once.
- Throughput: tokens/s of a GPT beside a plain single-process loop, in turns. Both stages share the
  GPU, so that nothing is to be gained here; it shows what the runtime costs. The timeline of the
  same pipelines is there to see that CUDA events are read: spans of both stages interleave.
- NCCL: the smallest group that one GPU allows, a single rank, through all calls of a pipeline.

Without a GPU it says so and ends with exit code 0; with one, 1 where a check has crashed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
from gpu_exactness import (
    NUM_BATCHES,
    NUM_MICROBATCHES,
    PP,
    check_dropout,
    check_exactness,
    check_group,
    make_pipeline,
)
from harness import CONSOLE, Target
from memory import CASES
from plain import Batches, plain_loop, random_batches
from torch import nn

import twobw
from twobw.models.sizes import GPTConfig

MEMORY_TOLERANCE = 0.05


@dataclass(frozen=True)
class Sizes:
    """What is trained: enough to keep a GPU busy, or to see on a CPU that this file runs.

    Attributes:
        exact: the GPT of the exactness checks.
        fast: the GPT of the throughput check.
        microbatch_size: of the throughput check, in samples.
        width: of the memory check's square layers.
        num_layers: of a stage there: few and many.
        num_timed: batches of a turn.
    """

    exact: GPTConfig
    fast: GPTConfig
    microbatch_size: int
    width: int
    num_layers: tuple[int, int]
    num_timed: int


ON_GPU = Sizes(
    exact=GPTConfig(4, 128, 4, sequence_length=64, vocab_size=256),
    fast=GPTConfig(12, 768, 12, sequence_length=512, vocab_size=50304),
    microbatch_size=8,
    width=2048,
    num_layers=(8, 32),
    num_timed=10,
)
ON_CPU = Sizes(
    exact=GPTConfig(2, 32, 2, sequence_length=16, vocab_size=64),
    fast=GPTConfig(2, 32, 2, sequence_length=16, vocab_size=64),
    microbatch_size=2,
    width=16,
    num_layers=(2, 4),
    num_timed=2,
)


def main() -> None:
    """Check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="default: out/gpu_check.json beside this file")
    add("--device", default="cuda", help=argparse.SUPPRESS)  # cpu: does this file run?
    options = parser.parse_args()
    device, name, sizes = torch.device(options.device), "CPU", ON_CPU
    if device.type == "cuda":
        if not torch.cuda.is_available():
            CONSOLE.print("gpu_check is skipped: torch sees no GPU on this machine")
            return
        device = torch.device("cuda", torch.cuda.current_device())
        name, sizes = torch.cuda.get_device_name(device), ON_GPU
    CONSOLE.print(f"device: {name}")
    checks = [
        partial(check_exactness, device, sizes.exact),
        partial(check_dropout, device, sizes.exact),
        partial(check_memory, device, sizes),
        partial(check_throughput, device, sizes),
        partial(check_group, device, sizes.exact),
    ]
    results, targets, num_crashed = {"device": name}, [], 0
    for check in checks:
        what = check.func.__name__
        try:
            results[what], reached = check()
            targets += reached
        except Exception:  # the other checks still have something to say
            num_crashed += 1
            results[what] = traceback.format_exc()
            CONSOLE.print(f"[bold red]CRASHED[/] {what}")
            CONSOLE.print(results[what], markup=False)
    harness.report("gpu_check", results, targets, options.json)
    if num_crashed:
        sys.exit(1)


def check_memory(device: torch.device, sizes: Sizes) -> tuple[Any, list[Target]]:
    """2BW beside the flush, and bytes a parameter."""
    if device.type != "cuda":
        CONSOLE.print("memory is not measured on a CPU: see memory.py")
        return None, []
    few, many = sizes.num_layers
    weights = [4 * PP * count * sizes.width**2 for count in (few, many)]
    sgd = {
        name: peak_of_layers(device, sizes.width, many, "SGD", name, {}) for name in ("1f1b", "2bw")
    }
    over = (sgd["2bw"] - sgd["1f1b"]) / weights[1]
    targets = [Target("2bw's peak over 1f1b's, in weights of all stages", over, 1.05)]
    rows, results = [], {"sgd_peak_bytes": sgd}
    for case in (case for case in CASES if case.dp == 1):
        peaks = [
            peak_of_layers(device, sizes.width, count, "Adam", case.schedule, case.settings)
            for count in (few, many)
        ]
        measured = 4 * (peaks[1] - peaks[0]) / (weights[1] - weights[0])
        constant = peaks[1] - measured * weights[1] / 4
        rows.append([case.name, str(case.stated), f"{measured:.2f}", f"{constant / 1e6:.0f}"])
        what = f"{case.name}: {measured:.2f} bytes a parameter beside {case.stated} stated, off by"
        targets.append(Target(what, abs(measured / case.stated - 1), MEMORY_TOLERANCE))
        results[case.name] = {"peak_bytes": peaks, "bytes_a_parameter": measured}
    columns = ["", "stated", "measured", "constant MB"]
    harness.print_table("bytes a parameter, Adam, on the GPU", columns, rows)
    return results, targets


def peak_of_layers(
    device: torch.device,
    width: int,
    num_layers: int,
    optimizer: str,
    schedule: str,
    settings: dict[str, Any],
) -> int:
    """Bytes allocated at most while a pipeline of square layers trains, above those before."""
    free(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    make = getattr(torch.optim, optimizer)
    layers = [nn.Linear(width, width, bias=False, device=device) for _ in range(PP * num_layers)]
    pipeline = twobw.Pipeline(
        layers,
        nn.functional.mse_loss,
        lambda parameters: make(parameters, lr=1e-3, foreach=False),
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        split=[num_layers] * PP,
        pp=PP,
        **settings,
    )
    del layers
    with pipeline:
        inputs, targets = torch.randn(2, NUM_MICROBATCHES, width, device=device)
        for _ in range(NUM_BATCHES):
            pipeline.train_step(inputs, targets)
        pipeline.drain()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def check_throughput(device: torch.device, sizes: Sizes) -> tuple[Any, list[Target]]:
    """Tokens/s of the pipeline beside a plain loop, without a target."""
    rows, results = [], {}
    config, num_samples = sizes.fast, sizes.microbatch_size * NUM_MICROBATCHES
    batches = random_batches(config, NUM_BATCHES, num_samples, device)
    tokens = sizes.num_timed * num_samples * config.sequence_length
    for precision in ("fp32", "bf16"):
        plain = plain_loop(config, batches, NUM_MICROBATCHES, precision)
        runs: dict[str, Callable[[], None]] = {"plain loop": plain}
        pipelines = {
            schedule: make_pipeline(config, schedule, device, {"precision": precision})
            for schedule in ("1f1b", "2bw")
        }
        runs |= {name: loop_over(pipeline, batches) for name, pipeline in pipelines.items()}
        seconds = in_turns(device, runs, sizes.num_timed)
        busy = {name: busy_fractions(pipeline) for name, pipeline in pipelines.items()}
        for pipeline in pipelines.values():
            pipeline.close()
        speeds = {name: [tokens / second for second in its] for name, its in seconds.items()}
        for name, its in speeds.items():
            over = median(a / b for a, b in zip(its, speeds["plain loop"], strict=True))
            parts = busy.get(name, [])
            text = " ".join(f"{part:.2f}" for part in parts)
            rows.append([f"{precision}, {name}", f"{median(its):.0f}", f"{over:.3f}", text])
            results[f"{precision}, {name}"] = {
                "tokens_per_second": its,
                "over_plain": over,
                "busy_fractions": parts,
            }
        del plain, runs, pipelines
        free(device)
    columns = ["two stages on one device", "tokens/s", "over the plain loop", "busy, by stage"]
    harness.print_table("throughput (bf16's plain loop: torch.autocast)", columns, rows)
    return results, []


def busy_fractions(pipeline: twobw.Pipeline) -> list[float]:
    """Of each stage, from its timeline.

    Raises:
        RuntimeError: a stage has no spans, or one that ends before it starts.
    """
    timeline = pipeline.timeline()
    assert timeline is not None, "the stages are threads"
    if timeline.ranks != list(range(PP)) or any(s.duration_ns < 0 for s in timeline.spans):
        raise RuntimeError(f"the timeline is not sound: ranks {timeline.ranks}")
    return [timeline.busy_fraction(rank) for rank in timeline.ranks]


def in_turns(
    device: torch.device, runs: dict[str, Callable[[], None]], num_timed: int, num_rounds: int = 3
) -> dict[str, list[float]]:
    """Seconds of every run's turns of ``num_timed`` calls, after a turn of two that is not
    timed."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(num_rounds + 1):
        for name, run in runs.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(num_timed if round_ else 2):
                run()
            synchronize(device)
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def loop_over(pipeline: twobw.Pipeline, batches: Batches) -> Callable[[], None]:
    """A call trains a batch."""
    endless = itertools.cycle(batches)

    def run() -> None:
        pipeline.train_step(*next(endless))

    return run


def synchronize(device: torch.device) -> None:
    """Until the GPU has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back what earlier checks held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
