"""Times of layers on one rank, under the conditions of a run.

Layers run in the order in which a stage runs them, equal ones as often as it has them, and with a
second microbatch in flight, so that each finds the caches as the others have left them: a layer
that ran alone would find its weights there. All ranks of the machine do this at once.

On a CPU a sample is processor time, since what other programs take falls on whichever layer they
interrupt, seldom on a short one, and a sum of medians by the clock would be off. How much longer
everything took by the clock is noted beside, so that it can be spread over all layers evenly.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from twobw.profiler.solo import Given, SoloLayer
from twobw.profiler.subject import Subject, filled
from twobw.runtime.messages import Layout, Message, TensorLayout, map_value

Kind: TypeAlias = Literal[
    "forward", "backward", "forward again", "backward again", "update", "copying update"
]
Samples: TypeAlias = dict[tuple[Kind, int, int], list[int]]
"""Nanoseconds by kind, layer (the trivial one is the last) and microbatch size (0: any)."""

NUM_ROUNDS = 3  # over all microbatch sizes: a machine's speed drifts
_ROUND_S = 0.7  # at least, for each microbatch size
_MIN_STEPS = 4  # of a round, beside the first, which does not count
_NUM_UPDATES = 10


def trivial_layer() -> nn.Module:
    """A layer that does next to nothing and yet has parameters, of one dimension each."""
    return nn.LayerNorm(1)


class Bench:
    """What is timed on one rank: the distinct layers of a model, its loss, and a trivial layer.

    Args:
        subject: the model.
        device: of this rank.

    Attributes:
        layers: in that order, the first of each. The trivial layer's times are what any stage
            takes by itself.
        samples: what has been measured so far.
        processor_ns: the sum of all that was measured.
        clock_ns: the same by the clock.
    """

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self._subject = subject
        self._device = device
        place = len(subject.layers) + 1
        trivial = SoloLayer(trivial_layer().to(device), place, subject.config, device)
        self.layers = [*subject.build(device), trivial]
        self._row = [
            (number, self._copy(number) if further else self.layers[number])
            for number, count in enumerate([*subject.counts_a_stage(), 1, 1])
            for further in range(count)
        ]
        self.samples: Samples = defaultdict(list)
        self.processor_ns = 0
        self.clock_ns = 0

    def _copy(self, number: int) -> SoloLayer:
        module = copy.deepcopy(self.layers[number].module)
        return SoloLayer(module, self._subject.firsts[number], self._subject.config, self._device)

    def input(self, number: int, microbatch_size: int) -> Given:
        """Something for a layer to run on."""
        if number < len(self.layers) - 1:
            return self._subject.input(number, microbatch_size, self._device)
        dtype = self.layers[-1].weights.dtype
        scalar = TensorLayout((1, 1), dtype, requires_grad=True, order=(0, 1))
        return filled(Layout(False, (scalar,)), self._device)

    def _inputs(self, microbatch_size: int) -> list[Given]:
        return [self.input(number, microbatch_size) for number in range(len(self.layers))]

    def time_microbatches(self, microbatch_size: int) -> None:
        """Measure forwards, backwards and recomputes of one microbatch size for a while."""
        given = self._inputs(microbatch_size)
        gradients = self._forwards(0, microbatch_size, given, counts=False)
        end = time.monotonic() + _ROUND_S
        step = 0
        while step <= _MIN_STEPS or time.monotonic() < end:
            counts = step > 0
            self._forwards(step + 1, microbatch_size, given, counts=counts)
            self._backwards(step, microbatch_size, gradients, counts=counts)
            self._backwards_again(step, microbatch_size, given, gradients, counts=counts)
            step += 1
        self._backwards(step, microbatch_size, gradients, counts=False)

    def time_updates(self) -> None:
        """Measure updates of a single version, then those that first copy the newest one. Between
        two of them a microbatch passes, so that weights are no fresher in the caches than in a
        run."""
        size = self._subject.microbatch_sizes[-1]
        given = self._inputs(size)
        kinds: tuple[Kind, ...] = ("update", "copying update")
        for num_slots, kind in enumerate(kinds, 1):
            for _, layer in self._row:
                layer.weights.rebase(num_slots)
            for repetition in range(_NUM_UPDATES + 1):
                gradients = self._forwards(0, size, given, counts=False)
                self._backwards(0, size, gradients, counts=False)
                for number, layer in self._row:
                    with self._timed(kind, number, 0, counts=repetition > 0):
                        layer.update()

    def _forwards(
        self, microbatch: int, size: int, given: Sequence[Given], *, counts: bool
    ) -> list[list[Tensor] | None]:
        """A forward of each layer, and gradients for what it gave."""
        layouts: list[Layout] = []
        for number, layer in self._row:
            own = _copied(given[number])
            with self._timed("forward", number, size, counts=counts):
                output = layer.forward(microbatch, own)
            layouts.append(output.layout)
            del own, output
        pairs = zip(self._row, layouts, strict=True)
        return [layer.output_gradients(layout) for (_, layer), layout in pairs]

    def _backwards(
        self,
        microbatch: int,
        size: int,
        gradients: Sequence[list[Tensor] | None],
        *,
        counts: bool,
    ) -> None:
        pairs = zip(self._row, gradients, strict=True)
        for (number, layer), gradient in reversed(list(pairs)):
            with self._timed("backward", number, size, counts=counts):
                layer.backward(microbatch, gradient)

    def _backwards_again(
        self,
        microbatch: int,
        size: int,
        given: Sequence[Given],
        gradients: Sequence[list[Tensor] | None],
        *,
        counts: bool,
    ) -> None:
        """Forwards that keep the input only, and backwards that run the layer again."""
        for number, layer in self._row:
            own = _copied(given[number])
            with self._timed("forward again", number, size, counts=counts):
                layer.forward(microbatch, own, again=True)
            del own
        pairs = zip(self._row, gradients, strict=True)
        for (number, layer), gradient in reversed(list(pairs)):
            with self._timed("backward again", number, size, counts=counts):
                layer.backward(microbatch, gradient, again=True)

    @contextmanager
    def _timed(self, kind: Kind, number: int, size: int, *, counts: bool) -> Iterator[None]:
        start_clock_ns = clock_ns(self._device)
        start_ns = time.thread_time_ns()
        yield
        processor_ns = time.thread_time_ns() - start_ns
        duration_ns = clock_ns(self._device) - start_clock_ns
        if self._device.type == "cuda":
            processor_ns = duration_ns
        if counts:
            self.samples[kind, number, size].append(processor_ns)
            self.processor_ns += processor_ns
            self.clock_ns += duration_ns


def clock_ns(device: torch.device) -> int:
    """The clock, once a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic_ns()


def _copied(given: Given) -> Given:
    """A copy of what a layer is given, which it may change."""
    if isinstance(given, Message):
        tensors = tuple(None if tensor is None else tensor.clone() for tensor in given.tensors)
        return Message(tensors, given.layout)
    return map_value(Tensor.clone, given)
