"""A `ModelProfile` without the hardware: for a device that is only described.

Layers run on the meta device, through the runtime's own stages. Each op is counted: floating-point
operations by torch's counter, bytes read and written by the shapes. A layer takes the longer of
the time for its products at the device's rate and the time for its bytes at the memory's. Equal
layers are counted once, so that the model may be of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from twobw.config import Config
from twobw.profiler.assembly import Duration, layer_profile, microbatch_profile
from twobw.profiler.device import DeviceSpec
from twobw.profiler.footprint import storages, take_footprint
from twobw.profiler.profile import (
    SCHEMA_VERSION,
    LayerProfile,
    MicrobatchProfile,
    ModelProfile,
    OverheadProfile,
)
from twobw.profiler.solo import Given, SoloLayer
from twobw.profiler.subject import Subject, make_subject

_META = torch.device("meta")
_ATEN = torch.ops.aten
_ALLOCATIONS = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty}
_OVERWRITES = {_ATEN.copy_, _ATEN.fill_, _ATEN.zero_}  # what they change they do not read


@dataclass(slots=True)
class Work:
    """What some ops do.

    Attributes:
        flops: floating-point operations of matrix products.
        moved_bytes: read and written.
    """

    flops: int = 0
    moved_bytes: int = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Counts the ops that run while it is open; the result is filled in at its end."""
    work = Work()
    counter = FlopCounterMode(display=False)
    with counter, MovedBytes() as moved:
        yield work
    work.flops, work.moved_bytes = counter.get_total_flops(), moved.total


class MovedBytes(TorchDispatchMode):
    """Sums the bytes that ops read and write, each op by itself as torch runs them; one that only
    looks at a tensor in another way moves nothing.

    Attributes:
        total: so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op and take in what it moves."""
        result = func(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        is_view = not func._schema.is_mutable and given.keys() >= storages(result).keys()
        if not is_view and func.overloadpacket not in _ALLOCATIONS:
            is_overwritten = func.overloadpacket in _OVERWRITES
            read = (args[1:] if is_overwritten else args, kwargs)
            leaves = tree_leaves((read, result))
            self.total += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return result


class AttentionAsOn(TorchFunctionMode):
    """Attention as a device runs it, which the meta device does not tell: fused, or op by op in
    the precision given, where only the softmax's result is kept of all pairs of tokens.

    Args:
        fused: whether it is fused.
    """

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self._attend = _fused_attention if fused else _plain_attention

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function, or what stands for it."""
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, is_causal: bool
) -> Tensor:
    attend = _ATEN._scaled_dot_product_flash_attention
    return attend(query, key, value, dropout_p, is_causal)[0]  # type: ignore[no-any-return]


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, is_causal: bool
) -> Tensor:
    scores = query @ key.transpose(-2, -1)
    scores.mul_(query.shape[-1] ** -0.5)  # and a mask, which is part of the same pass
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def compute_profile(
    config: Config, microbatch_sizes: Sequence[int], device: DeviceSpec
) -> ModelProfile:
    """Profile the model of ``config`` with its precision and optimizer for a device.

    Args:
        config: of the run that the profile is for.
        microbatch_sizes: in samples, ascending.
        device: what it would run on.

    Raises:
        DeviceError: the device has not got the precision.
    """
    clock = _Clock(config, device)
    with torch.random.fork_rng(devices=[]), AttentionAsOn(fused=device.fused_attention):
        subject = make_subject(config, microbatch_sizes)
        layers = subject.build(_META)
        entries = [_layer(subject, number, layer, clock) for number, layer in enumerate(layers)]
    return ModelProfile(
        schema_version=SCHEMA_VERSION,
        kind="analytic",
        model=config.model.name,
        device=device.name,
        num_threads=0,
        precision=config.training.precision,
        optimizer=config.optimizer.name,
        recomputes_attention=config.training.recompute == "attention",
        entries=tuple(entries[:-1]),
        layers=subject.layers,
        loss=entries[-1],
        ties=subject.ties,
        overhead=OverheadProfile(),
    )


class _Clock:
    """How long work takes on a device."""

    def __init__(self, config: Config, device: DeviceSpec) -> None:
        self._precision = config.training.precision
        self._sequence_length = config.model.sequence_length
        self._device = device

    def duration(self, work: Work, microbatch_size: int) -> Duration:
        """By what takes longer, products or memory."""
        tokens = microbatch_size * self._sequence_length
        rate = self._device.flops_per_second(self._precision, tokens)
        memory_s = work.moved_bytes / self._device.memory_bytes_per_second
        return Duration(round(max(work.flops / rate, memory_s) * 1e9))


def _layer(subject: Subject, number: int, layer: SoloLayer, clock: _Clock) -> LayerProfile:
    microbatches = [
        _microbatch(partial(subject.input, number, size, _META), size, layer, clock)
        for size in subject.microbatch_sizes
    ]
    size = subject.microbatch_sizes[-1]
    give = partial(subject.input, number, size, _META)
    alone, copying = (_update(num_slots, give, layer) for num_slots in (1, 2))
    # of Muon, too, the products have as many rows as matrices have, not few
    update = clock.duration(alone, size)
    return layer_profile(layer, microbatches, update, clock.duration(copying, size).beyond(update))


def _microbatch(
    give: Callable[[], Given], size: int, layer: SoloLayer, clock: _Clock
) -> MicrobatchProfile:
    footprint = take_footprint(layer, give)
    given = give()
    with counted() as forward:
        layout = layer.forward(0, given).layout
    gradients = layer.output_gradients(layout)
    with counted() as backward:
        layer.backward(0, gradients)
    forwards, backwards = (clock.duration(work, size) for work in (forward, backward))
    return microbatch_profile(size, footprint, forwards, backwards, recompute=forwards)


def _update(num_slots: int, give: Callable[[], Given], layer: SoloLayer) -> Work:
    """An update's work once the optimizer has its state."""
    layer.weights.rebase(num_slots)
    for _ in range(2):
        layer.backward(0, layer.output_gradients(layer.forward(0, give()).layout))
        with counted() as work:
            layer.update()
    return work
