"""What running layers again for their backward needs besides their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from twobw.runtime.messages import copy_of


class Buffers:
    """The buffers of some modules as they were, so that running a layer again neither counts
    twice (BatchNorm) nor sees what later microbatches made of them (spectral norm)."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._kept: list[tuple[nn.Module, str, Tensor]] = [
            (part, name, buffer.detach().clone())
            for module in modules
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]

    def __add__(self, other: Buffers) -> Buffers:
        both = Buffers([])
        both._kept = self._kept + other._kept
        return both

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the modules use these; put back what they had."""
        had: list[Tensor | None] = [module._buffers[name] for module, name, _ in self._kept]
        for module, name, buffer in self._kept:
            module._buffers[name] = buffer
        try:
            yield
        finally:  # checkpoint ends a run early, by an exception
            for (module, name, _), old in zip(self._kept, had, strict=True):
                module._buffers[name] = old


def recompute_attention(layers: Sequence[nn.Module]) -> None:
    """Make attention modules keep a copy of their inputs only: ``nn.MultiheadAttention`` and
    modules with a true ``is_attention`` (Korthikanti et al., 2022, "selective recomputation")."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.MultiheadAttention) or getattr(module, "is_attention", False):
                module.forward = partial(_keep_inputs_only, module, module.forward)


def _keep_inputs_only(
    module: nn.Module, forward: Callable[..., Any], *inputs: Any, **named_inputs: Any
) -> Any:
    """``forward(*inputs, **named_inputs)``. It may work in place on what it is given: the caller
    sees that, and the second run, for the backward, is given copies."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **named_inputs)
    copies: dict[Tensor, Tensor] = {}  # what is one tensor stays one
    runs = [
        tree_map_only(Tensor, lambda t: copies.setdefault(t, copy_of(t)), (inputs, named_inputs)),
        (inputs, named_inputs),
    ]

    def run() -> Any:
        inputs, named_inputs = runs.pop()
        return forward(*inputs, **named_inputs)

    buffers = Buffers([module])
    return checkpoint(
        run, use_reentrant=False, context_fn=lambda: (nullcontext(), buffers.in_place())
    )
