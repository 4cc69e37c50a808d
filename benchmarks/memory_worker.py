"""The measured processes of `memory.py`: each is one stage, and says how much memory it took.

Imports of torch stay in the methods: the parent of these processes must stay small.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import Seat, Team

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


@dataclass(frozen=True)
class Setup:
    """How it is trained.

    Attributes:
        workload: the layers.
        schedule: by name.
        pp: stages.
        dp: replicas of each.
        optimizer: a class of torch.optim.
        settings: further arguments of `twobw.Pipeline`.
        bucket_bytes: of reductions; 0 leaves what the runtime has.
    """

    workload: Workload
    schedule: str
    pp: int = 2
    dp: int = 1
    optimizer: str = "SGD"
    settings: dict[str, Any] = field(default_factory=dict)
    bucket_bytes: int = 0

    def team(self, name: str, *, fixed_allocator: bool = True) -> Team:
        """Its processes, made for it alone."""
        size, arguments = self.pp * self.dp, {"setup": self}
        return start(name, Worker, size, arguments, fixed_allocator=fixed_allocator)


@dataclass(frozen=True)
class Usage:
    """One rank's memory, in bytes: above its baseline, of its weights, of a microbatch's stash
    and its first layer's, of a layer's input."""

    peak_bytes: float
    weight_bytes: float
    stash_bytes: float
    layer_stash_bytes: float
    input_bytes: float


class Worker:
    """One stage's process."""

    def __init__(self, seat: Seat, setup: Setup) -> None:
        import torch

        from twobw import Pipeline
        from twobw.runtime import reduction

        seat.join()
        if setup.bucket_bytes:
            reduction.BUCKET_BYTES = setup.bucket_bytes
        self._baseline_bytes = peak_bytes()
        check_baseline(self._baseline_bytes)
        self._workload = setup.workload
        optimizer = getattr(torch.optim, setup.optimizer)
        self._pipeline = Pipeline(
            [self._build_layer] * (setup.pp * self._workload.num_layers),
            torch.nn.functional.mse_loss,
            lambda parameters: optimizer(parameters, lr=1e-3),
            schedule=setup.schedule,
            num_microbatches=self._workload.num_microbatches,
            split=[self._workload.num_layers] * setup.pp,
            pp=setup.pp,
            dp=setup.dp,
            **setup.settings,
        )
        shape = (self._workload.num_microbatches, self._workload.rows, self._workload.narrow)
        generator = torch.Generator().manual_seed(0)
        self._inputs, self._targets = torch.randn(2, *shape, generator=generator)

    def measure(self) -> Usage:
        """Train a few batches."""
        for _ in range(NUM_BATCHES):
            self._pipeline.train_step(self._inputs, self._targets)
        self._pipeline.drain()
        peak = peak_bytes() - self._baseline_bytes
        return Usage(peak, *self._count(self._inputs[:1].clone()))

    def turn(self, num_batches: int) -> tuple[float, float]:
        """Seconds, and seconds of this process's processor time, that batches take, filling and
        draining included."""
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(num_batches):
            self._pipeline.train_step(self._inputs, self._targets)
        self._pipeline.drain()
        return time.perf_counter() - start, time.process_time() - cpu_start

    def forward_share(self) -> float | None:
        """Of the time in forward and backward; on rank 0, of all ranks."""
        from twobw.core.ops import OpKind

        timeline = self._pipeline.timeline()
        if timeline is None:
            return None
        forward, backward = (
            sum(span.duration_ns for span in timeline.spans if span.op.kind is kind)
            for kind in (OpKind.FORWARD, OpKind.BACKWARD)
        )
        return forward / (forward + backward)

    def _build_layer(self) -> Any:
        from torch import nn

        narrow, wide = self._workload.narrow, self._workload.wide
        if not wide:
            return nn.Linear(narrow, narrow, bias=False)
        return nn.Sequential(nn.Linear(narrow, wide), nn.GELU(), nn.Linear(wide, narrow))

    def _count(self, inputs: Any) -> tuple[int, int, int, int]:
        """Bytes of a stage's weights; of what autograd keeps of one microbatch for the stage and
        for its first layer; and of a layer's input."""
        import torch

        stage = torch.nn.Sequential(
            *(self._build_layer() for _ in range(self._workload.num_layers))
        )
        weights = {p.untyped_storage().data_ptr(): p.nbytes for p in stage.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def stash_of(module: torch.nn.Module) -> int:
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = module(inputs)  # noqa: F841  (keeps the graph, so the addresses, alive)
                return sum(kept.values())

        return sum(weights.values()), stash_of(stage), stash_of(stage[0]), inputs.nbytes


class LongRun:
    """One stage's process that trains a small tied GPT, with much that could grow."""

    def __init__(self, seat: Seat) -> None:
        import torch

        import twobw
        from twobw.models.gpt import gpt_layers, loss_fn
        from twobw.models.sizes import gpt_config

        seat.join()
        torch.manual_seed(0)
        config = gpt_config("gpt-tiny", tied=True, dropout=0.1)
        self._pipeline = twobw.Pipeline(
            gpt_layers(config),
            loss_fn,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            max_grad_norm=1.0,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer),
        )
        text = torch.randint(config.vocab_size, (8, config.sequence_length + 1))
        self._inputs, self._targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def peaks(self, ends: list[int], evaluate_every: int) -> list[int]:
        """Train, and evaluate now and then; the peak so far after each number of batches."""
        peaks = []
        for batch in range(1, ends[-1] + 1):
            result = self._pipeline.train_step(self._inputs, self._targets)
            result.stage_metrics()
            if batch % evaluate_every == 0:
                self._pipeline.evaluate(self._inputs, self._targets)
            if batch in ends:
                peaks.append(peak_bytes())
        return peaks


def start(
    name: str, build: Any, size: int, arguments: dict[str, Any], *, fixed_allocator: bool = True
) -> Team:
    """Processes in which, by default, resident memory is what is held: see `memory.py`."""
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
    with harness.one_thread_each(), harness.environment(**(allocator if fixed_allocator else {})):
        team = Team(name, build, size, arguments)
    team.wait_until_built()
    return team


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
            f"baseline {baseline_bytes / 1e6:.0f} MB, but {resident / 1e6:.0f} MB are "
            "resident: a peak before the measurement would hide one in it"
        )
