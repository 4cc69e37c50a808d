"""The optimizer and the learning rate that the config asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from twobw.config import OptimizerSettings


def make_optimizer(
    settings: OptimizerSettings,
) -> Callable[[Iterable[tuple[str, Parameter]]], Optimizer]:
    """What ``Pipeline`` calls with a rank's (name, parameter) pairs."""

    def optimizer(parameters: Iterable[tuple[str, Parameter]]) -> Optimizer:
        if settings.name == "sgd":
            return SGD(
                parameters,
                lr=settings.lr,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                fused=False,
            )
        return AdamW(
            parameters,
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=False,  # a fused step differs in the last bit
        )

    return optimizer


def make_lr_scheduler(
    settings: OptimizerSettings, num_batches: int
) -> Callable[[Optimizer], LRScheduler]:
    """What ``Pipeline`` calls with a rank's optimizer; it steps the result once a batch."""
    factor = partial(lr_factor, settings=settings, num_batches=num_batches)
    return lambda optimizer: LambdaLR(optimizer, factor)


def lr_at(batch: int, settings: OptimizerSettings, num_batches: int) -> float:
    """The learning rate that the update of ``batch`` (0-based) uses."""
    return settings.lr * lr_factor(batch, settings, num_batches)


def lr_factor(batch: int, settings: OptimizerSettings, num_batches: int) -> float:
    """The part of ``settings.lr`` that the update of ``batch`` (0-based) uses.

    Warmup rises linearly and reaches 1 in its last batch; the decay falls from there and reaches
    ``final_lr_fraction`` in batch ``num_batches - 1``, where it stays.
    """
    if batch < settings.warmup_batches:
        return (batch + 1) / settings.warmup_batches
    if settings.decay == "constant":
        return 1.0
    first = max(settings.warmup_batches - 1, 0)
    progress = min((batch - first) / max(num_batches - 1 - first, 1), 1.0)
    left = 1.0 - progress if settings.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.final_lr_fraction + (1.0 - settings.final_lr_fraction) * left
