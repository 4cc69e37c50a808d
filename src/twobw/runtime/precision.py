"""Mixed precision: which dtype computes, and fp16's dynamic loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from twobw.runtime.messages import Value, map_value

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype that layers compute in.

    Raises:
        ValueError: not a `Precision`.
    """
    if precision not in _DTYPES:
        allowed = ", ".join(get_args(Precision))
        raise ValueError(f"precision = {precision!r} is not one of {allowed}")
    return _DTYPES[precision]


def computes_in_fp32(module: nn.Module) -> bool:
    """Whether a module keeps fp32 weights in mixed precision, beside its fp32 statistics."""
    return isinstance(module, _BatchNorm)


def cast(value: Value, dtype: torch.dtype) -> Value:
    """``value`` with its floating-point tensors in ``dtype``."""
    return map_value(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


class LossScaler:
    """fp16's loss scale: halved after an overflow, doubled after ``growth_interval`` batches
    without one (Micikevicius et al., 2018; the constants are those of torch.amp.GradScaler).

    The scale of batch ``k`` follows from the overflows up to batch ``k - 2``, which every rank
    knows when batch ``k`` starts, and so every rank has the same scale without asking.

    Args:
        initial: scale of the first batches.
        growth_interval: batches.
    """

    def __init__(self, initial: float = 65536.0, growth_interval: int = 2000) -> None:
        self._growth_interval = growth_interval
        self._good_batches = 0
        self._scales = [initial, initial]  # of the next two batches to be updated
        self._first = 0

    def scale(self, batch: int) -> float:
        """The loss scale of a batch."""
        return self._scales[batch - self._first]

    def history(self) -> tuple[list[float], int]:
        """The scales of the next two batches, and how many batches ended since the last overflow
        or growth: all that later scales follow from, where no batch is under way."""
        return list(self._scales), self._good_batches

    def restore(self, batch: int, scales: list[float], good_batches: int) -> None:
        """Go on from what `history` gave when ``batch`` was the next one."""
        self._first, self._scales, self._good_batches = batch, list(scales), good_batches

    def end_batch(self, *, has_overflowed: bool) -> None:
        """Take in what came of the oldest batch not yet ended."""
        newest = self._scales[-1]
        self._good_batches = 0 if has_overflowed else self._good_batches + 1
        if has_overflowed:
            newest /= 2
        elif self._good_batches == self._growth_interval:
            newest, self._good_batches = newest * 2, 0
        self._scales = [self._scales[1], newest]
        self._first += 1


def cast_rest(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Make ``dtype``, in place, what is fp32 and not trained: frozen parameters and buffers."""
    for module in modules:
        for part in module.modules():
            if computes_in_fp32(part):
                continue
            frozen = [p for p in part.parameters(recurse=False) if not p.requires_grad]
            for tensor in (*frozen, *part.buffers(recurse=False)):
                if tensor.dtype == torch.float32:
                    tensor.data = tensor.data.to(dtype)
