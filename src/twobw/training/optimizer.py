"""The optimizers and the learning rate that the config asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch.nn import Parameter
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from twobw.config import OptimizerSettings

Named: TypeAlias = list[tuple[str, Parameter]]

# The last two parts of the names of matrices that Muon is not for: rows of the embedding tables
# are looked up one by one, and the head has a row for each token or class.
_TABLES = ("token.weight", "position.weight", "logits.weight", "classes.weight")


def make_optimizer(
    settings: OptimizerSettings,
) -> Callable[[Iterable[tuple[str, Parameter]]], Sequence[Optimizer]]:
    """What ``Pipeline`` calls with a rank's (name, parameter) pairs."""

    def optimizers(parameters: Iterable[tuple[str, Parameter]]) -> Sequence[Optimizer]:
        named = list(parameters)
        if settings.name == "sgd":
            return [_sgd(named, settings)]
        if settings.name == "adamw":
            return [_adamw(named, settings)]
        matrices = [pair for pair in named if is_hidden_matrix(*pair)]
        rest = [pair for pair in named if not is_hidden_matrix(*pair)]
        made = [_muon(matrices, settings)] if matrices else []
        return [*made, _adamw(rest, settings)] if rest else made

    return optimizers


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Whether a parameter is a matrix inside the model: neither an embedding nor the head."""
    return parameter.ndim == 2 and not name.endswith(_TABLES)


def decay_groups(named: Named, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: what has fewer than two dimensions (norms and biases) has no weight
    decay; all else, embeddings and head included, has."""
    decayed = [pair for pair in named if pair[1].ndim >= 2]
    others = [pair for pair in named if pair[1].ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _sgd(named: Named, settings: OptimizerSettings) -> Optimizer:
    groups = decay_groups(named, settings.weight_decay)
    return SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=False)


def _adamw(named: Named, settings: OptimizerSettings) -> Optimizer:
    groups = decay_groups(named, settings.weight_decay)
    # a fused step differs in the last bit
    return AdamW(groups, lr=settings.lr, betas=settings.betas, fused=False)


def _muon(named: Named, settings: OptimizerSettings) -> Optimizer:
    return Muon(
        named,
        lr=settings.matrix_lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.ns_steps,
        adjust_lr_fn=settings.adjust_lr_fn,
    )


def make_lr_scheduler(
    settings: OptimizerSettings, num_batches: int
) -> Callable[[Optimizer], LRScheduler]:
    """What ``Pipeline`` calls with each of a rank's optimizers; it steps the result once a
    batch."""
    factor = partial(lr_factor, settings=settings, num_batches=num_batches)
    return lambda optimizer: LambdaLR(optimizer, factor)


def lr_at(batch: int, settings: OptimizerSettings, num_batches: int) -> float:
    """The learning rate that the update of ``batch`` (0-based) uses; of Muon's matrices, it is
    the same part of ``matrix_lr``."""
    return settings.lr * lr_factor(batch, settings, num_batches)


def lr_factor(batch: int, settings: OptimizerSettings, num_batches: int) -> float:
    """The part of its full rate that the update of ``batch`` (0-based) uses.

    Warmup rises linearly and reaches 1 in its last batch; the decay falls from there (``wsd``:
    from ``decay_batches`` before the end) and reaches ``final_lr_fraction`` in batch
    ``num_batches - 1``, where it stays.
    """
    if batch < settings.warmup_batches:
        return (batch + 1) / settings.warmup_batches
    if settings.decay == "constant":
        return 1.0
    first = max(settings.warmup_batches - 1, 0)  # the last batch at the full rate
    if settings.decay == "wsd":
        first = max(num_batches - 1 - settings.decay_batches(num_batches), first)
    progress = min(max(batch - first, 0) / max(num_batches - 1 - first, 1), 1.0)
    left = (1 + math.cos(math.pi * progress)) / 2 if settings.decay == "cosine" else 1.0 - progress
    return settings.final_lr_fraction + (1.0 - settings.final_lr_fraction) * left
