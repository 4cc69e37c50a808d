"""Single-process references, written plainly: no code of the runtime but its seeding of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twobw.runtime.randomness import seed_layer

Batches = Sequence[tuple[Tensor, Tensor]]


def run_model(model: nn.Sequential, x: Tensor, *, seed: int, batch: int, microbatch: int) -> Tensor:
    for index, layer in enumerate(model):
        seed_layer(seed, batch, microbatch, index)
        x = layer(x)
    return x


def train(
    model: nn.Sequential,
    loss_fn: Callable,
    make_optimizer: Callable,
    data: Batches,
    m: int,
    seed: int = 0,
    *,
    delay: int,
    max_grad_norm: float | None = None,
    dtype: torch.dtype | None = None,
    norms: list[float] | None = None,
) -> list[float]:
    """W(k+1) = W(k) - step(gradient of batch k at W(max(k - delay, 0))).

    ``delay = 0`` is plain training, ``delay = 1`` the rule of 2BW. ``model`` holds the newest
    weights; every version is kept beside it, and one copy of the model runs them all, so that
    buffers are shared. With ``dtype``, that copy computes in it, and gradients are added in fp32;
    fp16 scales the loss: by 65536, halved for batch k + 2 if batch k overflows, whose update is
    left out. Returns the losses; the gradient norms go to ``norms``.
    """
    optimizer = make_optimizer(list(model.named_parameters()))
    runner = copy.deepcopy(model)
    if dtype is not None:
        runner.to(dtype)
    versions = [[p.detach().clone() for p in model.parameters()]]
    scales = [65536.0] * (2 + len(data)) if dtype == torch.float16 else [1.0] * (2 + len(data))
    losses = []
    for k, (inputs, targets) in enumerate(data):
        with torch.no_grad():
            for parameter, value in zip(
                runner.parameters(), versions[max(k - delay, 0)], strict=True
            ):
                parameter.copy_(value)
        gradients: list[Tensor | None] = [None for _ in runner.parameters()]
        total = 0.0
        pieces = zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True)
        for microbatch, (x, y) in enumerate(pieces):
            x = x if dtype is None else x.to(dtype)
            output = run_model(runner, x, seed=seed, batch=k, microbatch=microbatch)
            loss = loss_fn(output if dtype is None else output.float(), y)
            share = len(x) / len(inputs)
            total += loss.item() * share
            (loss * share * scales[k]).backward()
            for i, parameter in enumerate(runner.parameters()):
                if parameter.grad is not None:
                    new = parameter.grad.to(model_dtype(model))
                    gradients[i] = new if gradients[i] is None else gradients[i] + new
                    parameter.grad = None
        losses.append(total)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient / scales[k]
        if all(g is None or g.isfinite().all() for g in gradients):
            if max_grad_norm is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                if norms is not None:
                    norms.append(norm.item())
            optimizer.step()
        else:
            scales[k + 2 :] = [scales[k + 1] / 2] * len(scales[k + 2 :])
        versions.append([p.detach().clone() for p in model.parameters()])
    for name, buffer in model.named_buffers():
        buffer.copy_(runner.get_buffer(name))
    return losses


def model_dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def train_plain(*arguments: Any, **options: Any) -> list[float]:
    """`train` without delay."""
    return train(*arguments, **options, delay=0)


def train_delayed(*arguments: Any, **options: Any) -> list[float]:
    """`train` by the rule of 2BW."""
    return train(*arguments, **options, delay=1)


def train_stashed(
    model: nn.Sequential,
    loss_fn: Callable,
    make_optimizer: Callable,
    data: Batches,
    m: int,
    split: Sequence[int],
    seed: int = 0,
    *,
    max_grad_norm: float | None = None,
) -> list[float]:
    """PipeDream's rule: an update after every microbatch i; stage s runs it on its own version
    max(i - (p - 1 - s), 0). Every version is kept; a model is put together for each microbatch.
    """
    p = len(split)
    stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
    optimizer = make_optimizer(list(model.named_parameters()))
    versions = [copy.deepcopy(model.state_dict())]
    worker = copy.deepcopy(model)
    losses, i = [], 0
    for batch, (inputs, targets) in enumerate(data):
        total = 0.0
        pieces = zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True)
        for microbatch, (x, y) in enumerate(pieces):
            with torch.no_grad():
                for name, parameter in worker.named_parameters():
                    stage = stage_of[int(name.split(".")[0])]
                    parameter.copy_(versions[max(i - (p - 1 - stage), 0)][name])
            for parameter in worker.parameters():
                parameter.grad = None
            output = run_model(worker, x, seed=seed, batch=batch, microbatch=microbatch)
            loss = loss_fn(output, y)
            loss.backward()
            total += loss.item() * (len(x) / len(inputs))
            for parameter, ran in zip(model.parameters(), worker.parameters(), strict=True):
                parameter.grad = ran.grad
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            versions.append(copy.deepcopy(model.state_dict()))
            i += 1
        losses.append(total)
    for name, buffer in model.named_buffers():
        buffer.copy_(worker.get_buffer(name))
    return losses
