"""Plain training loops of one process, without pipeline, to lay beside `twobw.Pipeline`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from twobw.models.gpt import gpt_layers, loss_fn
from twobw.models.sizes import GPTConfig

SEED = 0

Batches = list[tuple[Tensor, Tensor]]


def train_plainly(
    config: GPTConfig,
    batches: Batches,
    num_microbatches: int,
    *,
    is_delayed: bool,
    precision: str = "fp32",
    max_grad_norm: float | None = None,
) -> dict[str, Tensor]:
    """The weights after ``batches``: fp32 main weights, and a model that computes on the version
    that the schedule's rule gives each batch, the newest or the one before (``is_delayed``)."""
    device = batches[0][0].device
    model = nn.Sequential(*build(config, device))
    named = [(name, nn.Parameter(p.detach().clone())) for name, p in model.named_parameters()]
    mains = [parameter for _, parameter in named]
    if precision == "bf16":
        model.to(torch.bfloat16)
    optimizer = make_optimizer(named)
    before = newest = [main.detach().clone() for main in mains]
    for inputs, targets in batches:
        used = before if is_delayed else newest
        for parameter, weights in zip(model.parameters(), used, strict=True):
            parameter.data.copy_(weights)
        for x, y in zip(
            inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True
        ):
            (loss_fn(model(x), y) / num_microbatches).backward()
            for main, parameter in zip(mains, model.parameters(), strict=True):
                assert parameter.grad is not None
                gradient, parameter.grad = parameter.grad.float(), None
                main.grad = gradient if main.grad is None else main.grad.add_(gradient)
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(mains, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        before, newest = newest, [main.detach().clone() for main in mains]
    return {name: main.detach().cpu() for name, main in named}


def plain_loop(
    config: GPTConfig, batches: Batches, num_microbatches: int, precision: str
) -> Callable[[], None]:
    """A call trains a batch of microbatches, accumulating, in one process without pipeline."""
    device = batches[0][0].device
    model = nn.Sequential(*build(config, device))
    optimizer = make_optimizer(model.named_parameters())
    autocast = torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
    endless = itertools.cycle(batches)

    def run() -> None:
        inputs, targets = next(endless)
        optimizer.zero_grad()
        for x, y in zip(
            inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True
        ):
            with autocast:
                loss = loss_fn(model(x), y) / num_microbatches
            loss.backward()
        optimizer.step()

    return run


def build(config: GPTConfig, device: torch.device) -> list[nn.Module]:
    """The whole model, the same each time."""
    torch.manual_seed(SEED)
    layers = [x if isinstance(x, nn.Module) else x() for x in gpt_layers(config)]
    return list(nn.Sequential(*layers).to(device))  # at once: tied weights stay one


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum: a difference in a gradient stays as small in the weights."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def random_batches(
    config: GPTConfig, num_batches: int, num_samples: int, device: torch.device
) -> Batches:
    """The same each time."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (num_samples, config.sequence_length + 1)
    texts = [
        torch.randint(config.vocab_size, shape, generator=generator).to(device)
        for _ in range(num_batches)
    ]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


def largest_difference(state: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all weights, as a share of the largest."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    differences = (float((state[name] - expected[name]).abs().max()) for name in expected)
    return max(differences) / largest
