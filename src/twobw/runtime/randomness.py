"""Randomness belongs to the data, not to the rank.

Before each layer's forward the default generator is set from (seed, batch, microbatch, layer), so
that dropout does not depend on split, depth, schedule or rank, and no generator state is saved.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeAlias, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn

Result = TypeVar("Result")
Settings: TypeAlias = tuple[float, ...]

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 63-bit seed from several integers (splitmix64, Steele et al., 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_layer(seed: int, batch: int, microbatch: int, layer: int) -> None:
    """Set the default generators for one layer's forward of one microbatch.

    Args:
        seed: of the run.
        batch: 0-based.
        microbatch: place in the global batch, 0-based.
        layer: place in the unsplit model, 0-based.
    """
    torch.default_generator.manual_seed(mix(seed, batch, microbatch, layer))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mix(seed, batch, microbatch, layer))


def build_layer(seed: int, layer: int, build: Callable[[], Result]) -> Result:
    """Call ``build`` with the generator set from (seed, layer); the caller's stream goes on."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mix(seed, layer))
        return build()


class LayerRunner:
    """Runs layers with their generator set.

    Stages that are threads share the default generator: there, a lock covers the layers that
    draw, and the backwards that set the generator to run something again. Which ones do so is seen
    at a layer's first forward, made under the lock, and looked for again whenever one of its
    settings has changed.

    Args:
        seed: of the run.
        lock: of the default generator, where other stages in this process use it, too.
    """

    def __init__(self, seed: int, lock: threading.Lock | None) -> None:
        self._seed = seed
        self._lock = lock
        self._quiet: dict[int, Settings] = {}  # layers that drew nothing, with what settings
        self._known: dict[int, Settings | None] = {}  # layers that were watched, likewise
        self._checkpointed: set[int] = set()  # layers that torch.utils.checkpoint runs again

    def undisturbed(self) -> AbstractContextManager[object]:
        """While open, layers may set the default generator; the caller's stream goes on after.
        Stages that are threads see to it layer by layer, under the lock."""
        if self._lock is not None:
            return nullcontext()
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        return torch.random.fork_rng(devices)

    def backward(self) -> AbstractContextManager[object]:
        """To be open during a backward. What torch.utils.checkpoint runs again in it sets the
        default generator and puts it back, and between these no other stage's thread may draw."""
        return self._lock if self._lock is not None and self._checkpointed else nullcontext()

    def run(
        self,
        layer: Callable[[Any], Result],
        index: int,
        batch: int,
        microbatch: int,
        value: object,
    ) -> Result:
        """``layer(value)`` as layer ``index`` of the model; the loss comes after the last one."""
        if self._lock is None:
            seed_layer(self._seed, batch, microbatch, index)
            return layer(value)
        settings = _settings(layer) if isinstance(layer, nn.Module) else None
        if settings is not None and self._quiet.get(index) == settings:
            return layer(value)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with self._lock, torch.random.fork_rng(devices):
            seed_layer(self._seed, batch, microbatch, index)
            before = torch.random.get_rng_state()
            if index in self._known and self._known[index] == settings:
                output = layer(value)
            else:
                with _checkpoints() as are_made:
                    output = layer(value)
                if are_made:
                    self._checkpointed.add(index)
                self._known[index] = settings
            is_quiet = torch.equal(before, torch.random.get_rng_state())
        if is_quiet and settings is not None:
            self._quiet[index] = settings
        return output


@contextmanager
def _checkpoints() -> Iterator[list[bool]]:
    """While open, a call of torch.utils.checkpoint in this thread leaves an item in the list. It
    is found by its file, as it has no other sign."""
    are_made: list[bool] = []
    before = sys.getprofile()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if not are_made and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            are_made.append(True)

    sys.setprofile(look)
    try:
        yield are_made
    finally:
        sys.setprofile(before)


def _settings(layer: nn.Module) -> Settings:
    """The numbers and switches among the attributes of a layer's modules (``p``, ``training``)."""
    return tuple(
        value
        for module in layer.modules()
        for value in vars(module).values()
        if isinstance(value, (bool, int, float))
    )
