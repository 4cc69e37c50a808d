"""What running layers again for their backward needs besides their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from twobw.runtime.messages import copies_of

_SMALL_BYTES = 1 << 16
"""Buffers up to here are copied each time; larger ones (tables, masks) are compared first."""


class Buffers:
    """The buffers of some modules as they were, so that running a layer again neither counts
    twice (BatchNorm) nor sees what later microbatches made of them (spectral norm)."""

    def __init__(self, kept: Sequence[tuple[nn.Module, str, Tensor | None]]) -> None:
        self._kept = kept

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the modules use copies of these; put back what they had."""
        had: list[Tensor | None] = [module._buffers[name] for module, name, _ in self._kept]
        copies: dict[Tensor, Tensor] = {}  # what is one tensor stays one
        for module, name, buffer in self._kept:
            if buffer is not None and buffer not in copies:
                copies[buffer] = buffer.clone()
            module._buffers[name] = None if buffer is None else copies[buffer]
        try:
            yield
        finally:  # checkpoint ends a run early, by an exception
            for (module, name, _), old in zip(self._kept, had, strict=True):
                module._buffers[name] = old


class BufferKeeper:
    """Takes `Buffers` of some modules, again and again; one large table that stays as it is, is
    copied once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._last: dict[Tensor, Tensor] = {}  # copies, by the buffer

    def keep(self) -> Buffers:
        """The buffers of now."""
        now: dict[Tensor, Tensor] = {}
        kept: list[tuple[nn.Module, str, Tensor | None]] = []
        for part in self._parts:
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer not in now:
                    now[buffer] = self._copy(buffer)
                kept.append((part, name, None if buffer is None else now[buffer]))
        self._last = now
        return Buffers(kept)

    def _copy(self, buffer: Tensor) -> Tensor:
        last = self._last.get(buffer)
        if last is not None and buffer.nbytes > _SMALL_BYTES and torch.equal(last, buffer):
            return last
        return buffer.detach().clone()


def recompute_attention(layers: Sequence[nn.Module]) -> None:
    """Make attention modules keep their inputs only: ``nn.MultiheadAttention`` and modules with a
    true ``is_attention`` (Korthikanti et al., 2022, "selective recomputation")."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.MultiheadAttention) or getattr(module, "is_attention", False):
                keeper = BufferKeeper([module])
                module.forward = partial(_keep_inputs_only, keeper, module.forward)


def _keep_inputs_only(
    keeper: BufferKeeper, forward: Callable[..., Any], *inputs: Any, **named_inputs: Any
) -> Any:
    """``forward(*inputs, **named_inputs)``. It may work in place on what it is given: the caller
    sees that, and the second run, for the backward, is given copies made before."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **named_inputs)
    given = _Given((inputs, named_inputs))
    buffers = keeper.keep()
    output = checkpoint(
        partial(given.run, forward),
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), buffers.in_place()),
    )
    given.forget_what_is_not_needed()
    return output


class _Given:
    """The inputs of a function that runs twice."""

    def __init__(self, inputs: tuple[Any, Any]) -> None:
        self._inputs = inputs
        self._tensors = list(dict.fromkeys(t for t in tree_leaves(inputs) if isinstance(t, Tensor)))
        self._versions = [tensor._version for tensor in self._tensors]
        self._copies: list[Tensor] | None = copies_of(self._tensors)
        self._has_run = False

    def run(self, function: Callable[..., Any]) -> Any:
        """The first time on the inputs themselves, then on inputs as they were."""
        inputs = self._inputs
        if self._has_run and self._copies is not None:
            copies = dict(zip(self._tensors, self._copies, strict=True))
            inputs = tree_map_only(Tensor, copies.__getitem__, inputs)
        elif self._has_run and self._are_changed():
            raise RuntimeError(
                "what an attention module was given has been changed in place since, so that it "
                "cannot be run again; use recompute = 'layer', or do not change it"
            )
        self._has_run = True
        return function(*inputs[0], **inputs[1])

    def forget_what_is_not_needed(self) -> None:
        """The copies, unless the first run has changed what they are of."""
        if not self._are_changed():
            self._copies = None

    def _are_changed(self) -> bool:
        return [tensor._version for tensor in self._tensors] != self._versions
