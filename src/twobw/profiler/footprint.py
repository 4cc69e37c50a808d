"""What a forward keeps for its backward, and the most that either has in use at once.

Tensors are followed from the op that makes them to their end, which sees all that is kept: what
autograd saves, what a function keeps by itself, what a checkpoint keeps. What a kernel allocates
and frees within one op is not seen. On the meta device the same is found without memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twobw.profiler.solo import Given, SoloLayer
from twobw.runtime.messages import Message


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a layer and a microbatch, as in `MicrobatchProfile`."""

    input_bytes: int
    output_bytes: int
    stash_bytes: int
    kept_input_bytes: int
    kept_output_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops make while it is active, each once, until they
    are freed.

    Attributes:
        current: bytes in use now.
        peak: the most since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._live: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op and take in what it has made."""
        result = func(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        for key, storage in storages(result).items():
            if key not in given and key not in self._live:
                self._add(key, storage)
        return result

    def _add(self, key: int, storage: Any) -> None:
        num_bytes = storage.nbytes()
        self._live.add(key)
        self.current += num_bytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._free, key, num_bytes).atexit = False

    def _free(self, key: int, num_bytes: int) -> None:
        self._live.discard(key)
        self.current -= num_bytes


def storages(value: object) -> dict[int, Any]:
    """The storages of the tensors in nested lists, tuples and dicts, by identity."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in found}


class Watched:
    """The storages of some tensors, not kept alive.

    Args:
        tensors: whose.
        apart_from: storages that are watched already and do not count again.

    Attributes:
        num_bytes: of all, each once.
    """

    def __init__(self, tensors: object, apart_from: Watched | None = None) -> None:
        before: set[int] = apart_from._keys if apart_from else set()
        found = {key: s for key, s in storages(tensors).items() if key not in before}
        self._keys: set[int] = set(found)
        self._watched = [(weakref.ref(storage), storage.nbytes()) for storage in found.values()]
        self.num_bytes = sum(num_bytes for _, num_bytes in self._watched)

    def alive_bytes(self) -> int:
        """Of those that something still holds."""
        return sum(num_bytes for storage, num_bytes in self._watched if storage() is not None)


def take_footprint(layer: SoloLayer, make_input: Callable[[], Given]) -> Footprint:
    """Run a layer's forward and backward twice: the first makes the gradients that those of later
    microbatches are added to.

    Args:
        layer: nothing of it is in flight.
        make_input: makes what it runs on, which nothing else may hold.
    """
    layer.backward(0, layer.output_gradients(layer.forward(0, make_input()).layout))
    given = make_input()
    inputs = Watched(given.tensors if isinstance(given, Message) else given)
    with LiveBytes() as live:
        output = layer.forward(0, given)
        del given
        forward_peak, layout = live.peak, output.layout
        output_bytes = sum(t.nbytes for t in output.tensors if t is not None)
        outputs = Watched(output.tensors, apart_from=inputs)
        del output
        kept_output = outputs.alive_bytes()
        stash = live.current - kept_output
        kept_input = inputs.alive_bytes()
        live.peak = live.current
        layer.backward(0, layer.output_gradients(layout))
        backward_peak = live.peak
    return Footprint(
        input_bytes=inputs.num_bytes,
        output_bytes=output_bytes,
        stash_bytes=stash,
        kept_input_bytes=kept_input,
        kept_output_bytes=kept_output,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
    )
