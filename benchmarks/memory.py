"""How much memory: 2BW beside the flush (1F1B) and beside GPipe.

A fresh tree of processes for every configuration, two stages. A stage's memory is its process's
`ru_maxrss` at the end less the same after the imports and the start of the process group, before
a layer is built.

- Weight-heavy: stages of five 4096 x 4096 linear layers (336 MB), one row a microbatch, plain SGD.
  2BW holds one version more than the flush: the difference should be one stage's weights.
- Activation-heavy: stages of four narrow-wide-narrow layers (8 MB of weights, 135 MB of activations
  a microbatch), m = 8. GPipe stashes m microbatches, 2BW p - s on stage s but a version more:
  by ALGORITHM section 4 the difference is (m - (p - s)) (A/p + a) - W/p, where A/p + a, what
  autograd keeps of one microbatch, is counted in the same process after the measurement.

The C library's allocator keeps freed memory for later, more or less of it by the order of sizes.
So that resident memory is what is held, the children run with a fixed MALLOC_MMAP_THRESHOLD_
(every tensor of 64 KB or more goes back to the system when freed) and MALLOC_TRIM_THRESHOLD_.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Seat, Target, Team

NUM_STAGES = 2
MEGABYTE = 1e6
NUM_BATCHES = 3
PARENT_TOLERANCE_BYTES = 32e6


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        num_layers: of a stage.
        narrow: width of a layer's input and output.
        wide: width inside a layer; 0 makes it a single square matrix.
        rows: of a sample; a microbatch is one sample.
        num_microbatches: of a batch.
    """

    num_layers: int
    narrow: int
    wide: int
    rows: int
    num_microbatches: int


WEIGHT_HEAVY = Workload(num_layers=5, narrow=4096, wide=0, rows=1, num_microbatches=4)
ACTIVATION_HEAVY = Workload(num_layers=4, narrow=64, wide=4096, rows=1024, num_microbatches=8)


@dataclass(frozen=True)
class Usage:
    """One stage's memory, in bytes: above its baseline, of its weights, of a microbatch's stash."""

    peak_bytes: float
    weight_bytes: float
    stash_bytes: float


class Worker:
    """One stage's process. Imports of torch stay in the methods: the parent must stay small."""

    def __init__(self, seat: Seat, workload: Workload, schedule: str) -> None:
        import torch

        from twobw import Pipeline

        seat.join()
        self._baseline_bytes = peak_bytes()
        check_baseline(self._baseline_bytes)
        self._workload = workload
        layers = [self._build_layer] * (NUM_STAGES * workload.num_layers)
        self._pipeline = Pipeline(
            layers,
            torch.nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            schedule=schedule,
            num_microbatches=workload.num_microbatches,
            split=[workload.num_layers] * NUM_STAGES,
        )

    def measure(self) -> Usage:
        """Train a few batches."""
        import torch

        workload = self._workload
        shape = (workload.num_microbatches, workload.rows, workload.narrow)
        inputs, targets = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        for _ in range(NUM_BATCHES):
            self._pipeline.train_step(inputs, targets)
        self._pipeline.drain()
        peak = peak_bytes() - self._baseline_bytes
        return Usage(peak, *self._count(inputs[:1].clone()))

    def _build_layer(self) -> Any:
        from torch import nn

        narrow, wide = self._workload.narrow, self._workload.wide
        if not wide:
            return nn.Linear(narrow, narrow, bias=False)
        return nn.Sequential(nn.Linear(narrow, wide), nn.GELU(), nn.Linear(wide, narrow))

    def _count(self, inputs: Any) -> tuple[int, int]:
        """Bytes of a stage's weights, and of what autograd keeps of one microbatch."""
        import torch

        stage = torch.nn.Sequential(
            *(self._build_layer() for _ in range(self._workload.num_layers))
        )
        weights = {p.untyped_storage().data_ptr(): p.nbytes for p in stage.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = stage(inputs)  # noqa: F841  (keeps the graph, and so the addresses, alive)
        stash = sum(size for pointer, size in kept.items() if pointer not in weights)
        return sum(weights.values()), stash


def peak_bytes() -> int:
    """The most memory this process ever had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def check_baseline(baseline_bytes: int) -> None:
    """A child's ru_maxrss starts from its parent's memory: see that it does not show.

    Raises:
        RuntimeError: the baseline is well above what this process holds.
    """
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if baseline_bytes > resident + PARENT_TOLERANCE_BYTES:
        raise RuntimeError(
            f"baseline {baseline_bytes / MEGABYTE:.0f} MB, but {resident / MEGABYTE:.0f} MB are "
            "resident: a peak before the measurement would hide one in it"
        )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: out/memory.json")
    options = parser.parse_args()
    weights = {name: measure(WEIGHT_HEAVY, name) for name in ("1f1b", "2bw")}
    activations = {name: measure(ACTIVATION_HEAVY, name) for name in ("gpipe", "2bw")}
    show("weight-heavy, m = 4", weights)
    show("activation-heavy, m = 8", activations)
    targets = judge_weights(weights) + judge_activations(activations)
    results = {"weight_heavy": as_json(weights), "activation_heavy": as_json(activations)}
    harness.report("memory", results, targets, options.json)


def measure(workload: Workload, schedule: str) -> list[Usage]:
    """Every stage's memory, in processes made for this."""
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
    arguments = {"workload": workload, "schedule": schedule}
    with (
        harness.one_thread_each(),
        harness.environment(**allocator),
        Team(schedule, Worker, NUM_STAGES, arguments) as team,
    ):
        team.wait_until_built()
        return team.call("measure")


def show(title: str, usages: dict[str, list[Usage]]) -> None:
    """The table of one workload."""
    rows = [
        [f"{name}, stage {stage}", *(f"{n / MEGABYTE:.1f}" for n in asdict(usage).values())]
        for name, stages in usages.items()
        for stage, usage in enumerate(stages)
    ]
    columns = ["", "peak MB", "stage's weights MB", "a microbatch's stash MB"]
    harness.print_table(title, columns, rows)


def judge_weights(usages: dict[str, list[Usage]]) -> list[Target]:
    """2BW's peak over the flush's, in weights of the stage."""
    return [
        Target(
            f"weight-heavy, stage {stage}: 2bw's peak over 1f1b's, in stage weights",
            (ours.peak_bytes - flush.peak_bytes) / flush.weight_bytes,
            1.05,
        )
        for stage, (ours, flush) in enumerate(zip(usages["2bw"], usages["1f1b"], strict=True))
    ]


def judge_activations(usages: dict[str, list[Usage]]) -> list[Target]:
    """How far GPipe's peak less 2BW's is from the predicted difference."""
    targets = []
    for stage, (ours, gpipe) in enumerate(zip(usages["2bw"], usages["gpipe"], strict=True)):
        num_saved = ACTIVATION_HEAVY.num_microbatches - (NUM_STAGES - stage)
        predicted = num_saved * gpipe.stash_bytes - gpipe.weight_bytes
        measured = gpipe.peak_bytes - ours.peak_bytes
        what = (
            f"activation-heavy, stage {stage}: gpipe less 2bw is {measured / MEGABYTE:.0f} MB, "
            f"predicted {predicted / MEGABYTE:.0f} MB; relative error"
        )
        targets.append(Target(what, abs(measured / predicted - 1), 0.10))
    return targets


def as_json(usages: dict[str, list[Usage]]) -> dict[str, list[dict[str, float]]]:
    """By schedule and stage."""
    return {name: [asdict(usage) for usage in stages] for name, stages in usages.items()}


if __name__ == "__main__":
    main()
