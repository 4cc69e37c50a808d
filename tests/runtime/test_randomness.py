"""Which layers use the generator that threads share."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twobw.runtime.randomness import LayerRunner


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self._reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=self._reentrant)


def after_running(layer: nn.Module, lock: threading.Lock | None) -> LayerRunner:
    runner = LayerRunner(0, lock)
    runner.run(layer, 0, 0, 0, torch.ones(2, requires_grad=True))
    return runner


def test_backwards_are_alone_only_if_they_run_something_again() -> None:
    """Else stages that drop would not overlap."""
    lock = threading.Lock()
    for layer in (nn.Dropout(0.5), nn.Linear(2, 2)):
        assert isinstance(after_running(layer, lock).backward(), nullcontext)
    for use_reentrant in (False, True):
        layer = nn.Sequential(nn.Dropout(0.5), Checkpointed(use_reentrant=use_reentrant))
        assert after_running(layer, lock).backward() is lock
        assert isinstance(after_running(layer, None).backward(), nullcontext)
