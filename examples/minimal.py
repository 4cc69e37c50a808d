"""The smallest use of `twobw.Pipeline`: with python, or with torchrun --nproc-per-node 2."""

import os

import torch
import torch.distributed as dist
from torch import nn

import twobw


def main() -> None:
    """Learn the sum of 32 numbers."""
    if "RANK" in os.environ:  # under torchrun every rank is a stage; else two threads are
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    pipeline = twobw.Pipeline(
        layers,
        nn.functional.mse_loss,
        lambda named: torch.optim.AdamW(named, lr=1e-3),
        pp=None if dist.is_initialized() else 2,
    )
    generator = torch.Generator().manual_seed(1)  # the same batches on every rank
    for _ in range(300):
        inputs = torch.randn(64, 32, generator=generator)
        result = pipeline.train_step(inputs, inputs.sum(1, keepdim=True))
    loss = float(result.loss)
    state = pipeline.full_state_dict()
    if state is not None:  # on rank 0
        print(f"loss {loss:.3f}; weights: {', '.join(state)}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
