"""The exactness checks of `gpu_check.py`: weights beside a plain loop's on the same device."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import CONSOLE, Target
from plain import (
    SEED,
    Batches,
    build,
    largest_difference,
    make_optimizer,
    random_batches,
    train_plainly,
)
from torch import Tensor

import twobw
from twobw.models.gpt import loss_fn
from twobw.models.sizes import GPTConfig

PP = 2
NUM_MICROBATCHES = 4
NUM_BATCHES = 5
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}  # of the largest weight; a version off is 1e-2
MAX_GRAD_NORM = 0.1  # low enough to clip


@dataclass(frozen=True)
class Case:
    """One exactness check.

    Attributes:
        name: what it is about.
        schedule: by name.
        tied: whether embedding and head are.
        settings: further arguments of `twobw.Pipeline`.
    """

    name: str
    schedule: str = "2bw"
    tied: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        return str(self.settings.get("precision", "fp32"))


EXACT_CASES = [
    Case("1f1b", schedule="1f1b"),
    Case("gpipe", schedule="gpipe"),
    Case("2bw"),
    Case("2bw, recompute=layer", settings={"recompute": "layer"}),
    Case("2bw, recompute=attention", settings={"recompute": "attention"}),
    Case("2bw, tied, clipped", tied=True, settings={"max_grad_norm": MAX_GRAD_NORM}),
    Case("2bw, two replicas", settings={"dp": 2}),
    Case("2bw, bf16", settings={"precision": "bf16"}),
    Case(
        "2bw, bf16, tied, clipped, recompute=stage",
        tied=True,
        settings={"precision": "bf16", "max_grad_norm": MAX_GRAD_NORM, "recompute": "stage"},
    ),
]


def check_exactness(device: torch.device, config: GPTConfig) -> tuple[Any, list[Target]]:
    """Every case beside the plain loop."""
    rows, targets, results = [], [], {}
    for case in EXACT_CASES:
        tied = replace(config, tied=case.tied)
        batches = random_batches(tied, NUM_BATCHES, 2 * 2 * NUM_MICROBATCHES, device)
        expected = train_plainly(
            tied,
            batches,
            NUM_MICROBATCHES * case.settings.get("dp", 1),
            is_delayed=case.schedule == "2bw",
            precision=case.precision,
            max_grad_norm=case.settings.get("max_grad_norm"),
        )
        state, losses = train_by_pipeline(tied, case.schedule, batches, device, case.settings)
        difference = largest_difference(state, expected)
        rows.append([case.name, f"{difference:.1e}", f"{losses[0]:.4f}", f"{losses[-1]:.4f}"])
        limit = TOLERANCE[case.precision]
        targets.append(Target(f"{case.name}: difference over the tolerance", difference / limit, 1))
        results[case.name] = {"difference": difference, "tolerance": limit, "losses": losses}
    columns = ["", "of the largest weight", "loss, batch 0", f"batch {NUM_BATCHES - 1}"]
    harness.print_table("weights beside a plain loop's: largest difference", columns, rows)
    return results, targets


def check_dropout(device: torch.device, config: GPTConfig) -> tuple[Any, list[Target]]:
    """Dropout depends on neither depth nor recompute."""
    config = replace(config, dropout=0.2)
    batches = random_batches(config, NUM_BATCHES, 2 * NUM_MICROBATCHES, device)
    expected, _ = train_by_pipeline(config, "1f1b", batches, device, {}, pp=1)
    targets, results = [], {}
    for recompute in ("none", "layer", "stage", "attention"):
        state, _ = train_by_pipeline(config, "1f1b", batches, device, {"recompute": recompute})
        difference = largest_difference(state, expected)
        what = f"dropout, two stages, recompute={recompute}, beside one stage"
        targets.append(
            Target(f"{what}: difference over the tolerance", difference / TOLERANCE["fp32"], 1)
        )
        results[recompute] = difference
    return results, targets


def check_group(device: torch.device, config: GPTConfig) -> tuple[Any, list[Target]]:
    """Every call of a pipeline that is a process group's only rank."""
    batches = random_batches(config, NUM_BATCHES, 2 * NUM_MICROBATCHES, device)
    expected = train_plainly(
        config, batches, NUM_MICROBATCHES, is_delayed=False, max_grad_norm=MAX_GRAD_NORM
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            settings = {"max_grad_norm": MAX_GRAD_NORM}
            with make_pipeline(config, "1f1b", device, settings, pp=1) as pipeline:
                for inputs, targets in batches:
                    result = pipeline.train_step(inputs, targets)
                pipeline.check_replicas()
                state, timeline = pipeline.full_state_dict(), pipeline.timeline()
                loss, metrics = pipeline.evaluate(*batches[0]), result.stage_metrics()
                pipeline.forward(batches[0][0])
        finally:
            dist.destroy_process_group()
    assert state is not None, "this is rank 0"
    assert timeline is not None, "this is rank 0"
    assert metrics is not None, "this is rank 0"
    difference = largest_difference(state, expected)
    results = {
        "difference": difference,
        "evaluation": loss,
        "grad_norm": result.grad_norm,
        "busy_fraction": timeline.busy_fraction(0),
        "peak_bytes": metrics[0].peak_bytes,
    }
    CONSOLE.print(f"one rank of {backend}: {results}")
    what = f"one rank of {backend}, clipped: difference over the tolerance"
    return results, [Target(what, difference / TOLERANCE["fp32"], 1)]


def train_by_pipeline(
    config: GPTConfig,
    schedule: str,
    batches: Batches,
    device: torch.device,
    settings: dict[str, Any],
    pp: int = PP,
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after ``batches``, and the losses."""
    with make_pipeline(config, schedule, device, settings, pp) as pipeline:
        losses = [pipeline.train_step(inputs, targets).loss for inputs, targets in batches]
        state = pipeline.full_state_dict()
        assert state is not None, "the stages are threads"
        return state, [float(loss) for loss in losses]


def make_pipeline(
    config: GPTConfig,
    schedule: str,
    device: torch.device,
    settings: dict[str, Any],
    pp: int = PP,
) -> twobw.Pipeline:
    """Stages that are threads."""
    return twobw.Pipeline(
        build(config, device),
        loss_fn,
        make_optimizer,
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        pp=pp,
        seed=SEED,
        **settings,
    )
