"""What a schedule's delay costs a model's training, and what wins it back.

    python benchmarks/delay_emulator.py --schedule 2bw-fresh --stages 2 --microbatches 4 \
        --optimizer muon --lr 1e-3 --matrix-lr 0.02 --batches 800 --lookahead 1

trains the byte GPT of ``configs/demo.toml`` on the same text, prints the validation loss and adds
a line of JSON to ``--out``. One process, one thread: versions and weights are those of a pipeline
(`delay_rules`), not its speed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from delay_rules import Emulator, delay_compensation

from twobw.config import OptimizerSettings
from twobw.core.generators import SCHEDULES
from twobw.models.gpt import gpt_layers, loss_fn
from twobw.models.sizes import GPTConfig, gpt_config
from twobw.training.data import TextData
from twobw.training.optimizer import make_lr_scheduler, make_optimizer


@dataclass(frozen=True)
class Run:
    """One training run of the byte GPT; see ``--help``."""

    size: GPTConfig
    settings: OptimizerSettings
    emulator: dict[str, Any]
    batches: int
    batch_size: int
    delay_compensation: float
    validate_ahead: bool
    log_every: int

    def losses(self) -> tuple[float, float]:
        """Validation loss, and the mean training loss of the last 50 batches."""
        data = TextData(sequence_length=self.size.sequence_length, seed=self.emulator["seed"])
        emulator = Emulator(
            gpt_layers(self.size),
            loss_fn,
            make_optimizer(self.settings),
            lr_scheduler=make_lr_scheduler(self.settings, self.batches),
            correction=delay_compensation(self.delay_compensation)
            if self.delay_compensation
            else None,
            **self.emulator,
        )
        for batch in range(self.batches):
            emulator.train_step(*data.batch(batch * self.batch_size, self.batch_size))
            if self.log_every and (batch + 1) % self.log_every == 0:
                recent = emulator.losses[-self.log_every :]
                print(f"batch {batch + 1}: {sum(recent) / len(recent):.4f}", flush=True)
        validation = emulator.evaluate(data.validation_batches(64, 16), ahead=self.validate_ahead)
        last = emulator.losses[-50:]
        return validation, sum(last) / len(last)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--schedule", default="2bw", choices=list(SCHEDULES))
    add("--stages", type=int, default=2)
    add("--layers", type=int, default=4, help="blocks of the GPT")
    add("--microbatches", type=int, default=4)
    add("--update-lag", type=int, help="of 2bw-fresh")
    add("--extra-in-flight", type=int, help="of the schedules around 2bw")
    add("--optimizer", default="adamw", choices=["adamw", "muon", "sgd"])
    add("--lr", type=float, default=1e-3)
    add("--matrix-lr", type=float, default=0.02, help="of Muon's matrices")
    add("--momentum", type=float, default=0.9, help="Muon's and SGD's")
    add("--no-nesterov", action="store_true", help="Muon without")
    add("--betas", type=float, nargs=2, default=(0.9, 0.95), help="AdamW's")
    add("--weight-decay", type=float, default=0.0)
    add("--warmup-batches", type=int, default=50)
    add("--decay", default="cosine", choices=["constant", "linear", "cosine", "wsd"])
    add("--batches", type=int, default=800)
    add("--batch-size", type=int, default=16)
    add("--max-grad-norm", type=float, default=1.0, help="0: not clipped")
    add("--seed", type=int, default=0)
    add("--lookahead", type=float, default=0.0, help="a of W + a (W - W before)")
    add("--flush-batches", type=int, default=0, help="so many batches by 1f1b first")
    add("--delay-compensation", type=float, default=0.0, help="strength of DC-ASGD's term")
    add("--validate-ahead", action="store_true", help="on the extrapolated weights")
    add("--log-every", type=int, default=100)
    add("--out", type=Path, default=Path("benchmarks/out/delay.jsonl"))
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    torch.set_num_threads(1)
    options = {
        option: getattr(given, option)
        for option in ("update_lag", "extra_in_flight")
        if getattr(given, option) is not None
    }
    run = Run(
        gpt_config("gpt-demo", num_layers=given.layers),
        OptimizerSettings(
            name=given.optimizer,
            lr=given.lr,
            matrix_lr=given.matrix_lr,
            momentum=given.momentum,
            nesterov=not given.no_nesterov,
            betas=tuple(given.betas),
            weight_decay=given.weight_decay,
            warmup_batches=given.warmup_batches,
            decay=given.decay,
        ),
        {
            "schedule": given.schedule,
            "num_microbatches": given.microbatches,
            "pp": given.stages,
            "options": options,
            "seed": given.seed,
            "max_grad_norm": given.max_grad_norm or None,
            "lookahead": given.lookahead,
            "flush_batches": given.flush_batches,
        },
        given.batches,
        given.batch_size,
        given.delay_compensation,
        given.validate_ahead,
        given.log_every,
    )
    start = time.perf_counter()
    validation, training = run.losses()
    seconds = time.perf_counter() - start
    print(f"validation loss {validation:.4f}, training loss {training:.4f}, {seconds:.0f} s")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    arguments = {name: value for name, value in vars(given).items() if name != "out"}
    line = {**arguments, "validation": validation, "training": training, "seconds": seconds}
    with given.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
