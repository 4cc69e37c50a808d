"""What running layers again for their backward needs besides their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
        yield
        for (module, name, _), old in zip(self._kept, had, strict=True):
            module._buffers[name] = old


def recompute_attention(layers: Sequence[nn.Module]) -> None:
    """Make attention modules keep their inputs only: ``nn.MultiheadAttention`` and modules with a
    true ``is_attention`` (Korthikanti et al., 2022, "selective recomputation")."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.MultiheadAttention) or getattr(module, "is_attention", False):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
