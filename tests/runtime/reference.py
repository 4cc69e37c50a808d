"""Single-process references, written plainly: no code of the runtime but its seeding of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twobw.runtime.randomness import seed_layer

Batches = Sequence[tuple[Tensor, Tensor]]
Delay = Callable[[int, int], int]
"""(layer, microbatch's place in the batch) -> 0 or 1"""


def stale_first(split: Sequence[int], m: int, extra: int = 0) -> Delay:
    """The rule of 2bw-fresh: on stage s the first (p - 1 - s) + ``extra`` of a pipeline's m
    microbatches are one batch old. Replicas have m each, one after another."""
    p = len(split)
    stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
    return lambda layer, place: int(place % m < p - 1 - stage_of[layer] + extra)


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
    delay: int | Delay | Sequence[Delay],
    max_grad_norm: float | None = None,
    dtype: torch.dtype | None = None,
    norms: list[float] | None = None,
    flush_batches: int = 0,
    lookahead: float = 0.0,
    backward_on_newest: bool = False,
    dp: int = 1,
) -> list[float]:
    """W(k+1) = W(k) - step(gradient of batch k at W(k - delay)).

    ``delay = 0`` is plain training, ``delay = 1`` the rule of 2BW; a function gives that of each
    layer and microbatch, several that of each batch. The first ``flush_batches`` have
    none, and no version is older than the first after them. With ``lookahead`` a, delayed weights
    are W(v) + a (W(v) - W(v-1)), where there is such a W(v-1). ``backward_on_newest``: between
    its forward and its backward, a microbatch's weights become W(k). ``dp`` replicas have m / dp
    microbatches each, and each starts its backwards from the mean over its own samples, which
    matters where fp16 overflows.

    ``model`` holds the newest weights; every version is kept beside it, and one copy of the model
    runs them all, so that buffers are shared. With ``dtype``, that copy computes in it, and
    gradients are added in fp32; fp16 scales the loss: by 65536, halved for batch k + 2 if batch k
    overflows, whose update is left out. Returns the losses; the gradient norms go to ``norms``.
    """
    constant = delay if callable(delay) else lambda layer, microbatch: delay
    delays = delay if isinstance(delay, Sequence) else [constant] * len(data)
    layer_of = [int(name.split(".")[0]) for name, _ in model.named_parameters()]
    optimizer = make_optimizer(list(model.named_parameters()))
    runner = copy.deepcopy(model)
    if dtype is not None:
        runner.to(dtype)
    versions = [[p.detach().clone() for p in model.parameters()]]
    scales = [65536.0] * (2 + len(data)) if dtype == torch.float16 else [1.0] * (2 + len(data))
    losses = []
    for k, (inputs, targets) in enumerate(data):
        gradients: list[Tensor | None] = [None for _ in runner.parameters()]
        total = 0.0
        pieces = list(zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True))
        for microbatch, (x, y) in enumerate(pieces):
            for i, parameter in enumerate(runner.parameters()):
                start = min(k, flush_batches)
                v = max(k - delays[k](layer_of[i], microbatch), start)
                value = versions[v][i]
                if start < v < k and lookahead:
                    value = torch.add(versions[v - 1][i] * -lookahead, value, alpha=1 + lookahead)
                parameter.data.copy_(value)
            x = x if dtype is None else x.to(dtype)
            output = run_model(runner, x, seed=seed, batch=k, microbatch=microbatch)
            loss = loss_fn(output if dtype is None else output.float(), y)
            share = len(x) / len(inputs)
            total += loss.item() * share
            if backward_on_newest:
                for i, parameter in enumerate(runner.parameters()):
                    parameter.data.copy_(versions[k][i])
            first = microbatch // (m // dp) * (m // dp)
            mates = sum(len(x) for x, _ in pieces[first : first + m // dp])
            (loss * (len(x) / mates) * scales[k]).backward()
            for i, parameter in enumerate(runner.parameters()):
                if parameter.grad is not None:
                    new = parameter.grad.to(model_dtype(model))
                    new = new * (mates / len(inputs)) if dp > 1 else new
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
    dtype: torch.dtype | None = None,
    norms: list[float] | None = None,
    flush_batches: int = 0,
    dp: int = 1,
) -> list[float]:
    """PipeDream's rule: an update after every microbatch i of m, which all replicas have part in;
    stage s runs it on its own version max(i - (p - 1 - s), 0). Every version is kept; a model is
    put together for each microbatch, in which the copies of a tied weight have those of their
    stages. The other arguments are those of `train`; ``norms`` are of each batch's last update.
    """
    p = len(split)
    stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
    optimizer = make_optimizer(list(model.named_parameters()))
    common = {"max_grad_norm": max_grad_norm, "dtype": dtype, "norms": norms, "dp": dp}
    flushed = data[:flush_batches]
    losses = train(model, loss_fn, lambda _: optimizer, flushed, m * dp, seed, delay=0, **common)
    worker = nn.Sequential(*(copy.deepcopy(layer) for layer in model)).to(dtype)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    versions = [copy.deepcopy(model.state_dict())]
    for batch, (inputs, targets) in enumerate(data[flush_batches:], flush_batches):
        total = 0.0
        pieces = list(zip(inputs.tensor_split(m * dp), targets.tensor_split(m * dp), strict=True))
        for place in range(m):
            i = (batch - flush_batches) * m + place
            for name in names:
                stage = stage_of[int(name.split(".")[0])]
                version = versions[max(i - (p - 1 - stage), 0)]
                worker.get_parameter(name).data.copy_(version[name])
            model.zero_grad()
            mates = sum(len(x) for x, _ in pieces[place::m])
            for microbatch in range(place, m * dp, m):
                x, y = pieces[microbatch]
                output = run_model(
                    worker, x.to(dtype), seed=seed, batch=batch, microbatch=microbatch
                )
                loss = loss_fn(output if dtype is None else output.float(), y)
                loss.backward()
                total += loss.item() * (len(x) / len(inputs))
                for name in names:
                    parameter, ran = model.get_parameter(name), worker.get_parameter(name)
                    if ran.grad is not None:
                        new = ran.grad.to(parameter.dtype) * (len(x) / mates)
                        parameter.grad = new if parameter.grad is None else parameter.grad + new
                        ran.grad = None
            if max_grad_norm is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                if norms is not None and place == m - 1:
                    norms.append(norm.item())
            optimizer.step()
            versions.append(copy.deepcopy(model.state_dict()))
        losses.append(total)
    for name, buffer in model.named_buffers():
        buffer.copy_(worker.get_buffer(name))
    return losses
