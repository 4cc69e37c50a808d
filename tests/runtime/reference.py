"""Single-process references, written plainly: no code of the runtime but its seeding of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from twobw.runtime.randomness import seed_layer

Batches = Sequence[tuple[Tensor, Tensor]]


def run_model(model: nn.Sequential, x: Tensor, *, seed: int, batch: int, microbatch: int) -> Tensor:
    for index, layer in enumerate(model):
        seed_layer(seed, batch, microbatch, index)
        x = layer(x)
    return x


def batch_gradients(
    model: nn.Sequential,
    loss_fn: Callable,
    batch: int,
    data: tuple[Tensor, Tensor],
    m: int,
    seed: int,
) -> tuple[list[Tensor | None], float]:
    """Gradient of the mean loss over a batch, microbatches added in ascending order."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    inputs, targets = data
    pieces = zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True)
    total = 0.0
    for microbatch, (x, y) in enumerate(pieces):
        output = run_model(model, x, seed=seed, batch=batch, microbatch=microbatch)
        loss = loss_fn(output, y)
        share = len(x) / len(inputs)
        total += loss.item() * share
        (loss * share).backward()
    return [parameter.grad for parameter in parameters], total


def train_plain(
    model: nn.Sequential,
    loss_fn: Callable,
    make_optimizer: Callable,
    data: Batches,
    m: int,
    seed: int = 0,
) -> list[float]:
    """W(k+1) = W(k) - step(gradient at W(k)). Trains ``model``; returns the losses."""
    optimizer = make_optimizer(list(model.named_parameters()))
    losses = []
    for batch, pair in enumerate(data):
        _, loss = batch_gradients(model, loss_fn, batch, pair, m, seed)
        optimizer.step()
        losses.append(loss)
    return losses


def train_delayed(
    model: nn.Sequential,
    loss_fn: Callable,
    make_optimizer: Callable,
    data: Batches,
    m: int,
    seed: int = 0,
) -> list[float]:
    """The rule of 2BW: W(k+1) = W(k) - step(gradient of batch k at W(max(k - 1, 0))).

    ``model`` holds the newest weights; ``older`` the weights of the version before.
    """
    optimizer = make_optimizer(list(model.named_parameters()))
    older = copy.deepcopy(model)
    losses = []
    for batch, pair in enumerate(data):
        gradients, loss = batch_gradients(older, loss_fn, batch, pair, m, seed)
        if batch > 0:
            # the next batch runs on what are now the newest weights; buffers are those of the
            # model that ran, since versions share them
            with torch.no_grad():
                for old, new in zip(older.parameters(), model.parameters(), strict=True):
                    old.copy_(new)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        losses.append(loss)
    for name, buffer in model.named_buffers():
        buffer.copy_(older.get_buffer(name))
    return losses


def train_stashed(
    model: nn.Sequential,
    loss_fn: Callable,
    make_optimizer: Callable,
    data: Batches,
    m: int,
    split: Sequence[int],
    seed: int = 0,
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
            optimizer.step()
            versions.append(copy.deepcopy(model.state_dict()))
            i += 1
        losses.append(total)
    for name, buffer in model.named_buffers():
        buffer.copy_(worker.get_buffer(name))
    return losses
