"""Where values that are not finite first appear: what each layer gives in training is summed, and
the sums are looked at a few batches later, so that no device is waited for.

By the time that a loss is known to be NaN, updates have carried it into every weight: running the
batch again would find nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from twobw.runtime.collectives import Collective
from twobw.runtime.messages import Value

_LAG = 2  # batches, after which reading a sum waits for nothing
_NOTHING = 2**62


@dataclass(frozen=True, slots=True, order=True)
class NonFinite:
    """Values that are not finite, and where. Ordered by when they came about.

    Attributes:
        batch: 0-based.
        microbatch: place in the global batch, 0-based.
        layer: place in the unsplit model of the layer that gave them; one after the last is the
            loss function.
        stage: of that layer.
        replica: likewise.
        version: of the weights that it ran on.
    """

    batch: int
    microbatch: int
    layer: int
    stage: int
    replica: int
    version: int

    def __str__(self) -> str:
        return (
            f"layer {self.layer} on stage {self.stage}, in microbatch {self.microbatch} of batch "
            f"{self.batch}, on weight version {self.version}"
        )


class FiniteWatch:
    """One rank's.

    Args:
        stage: of the rank.
        replica: of the rank.

    Attributes:
        version: of the weights that layers run on now.
        first: the first values seen that are not finite; nothing is summed once there are some.
    """

    def __init__(self, stage: int, replica: int) -> None:
        self._stage = stage
        self._replica = replica
        self.version = 0
        self.first: NonFinite | None = None
        self._sums: deque[tuple[NonFinite, Tensor]] = deque()

    def add(self, value: Value, layer: int, batch: int, microbatch: int) -> None:
        """Take in what a layer (or the loss function) gives."""
        if self.first is not None:
            return
        where = NonFinite(batch, microbatch, layer, self._stage, self._replica, self.version)
        for tensor in _floating(value):
            self._sums.append((where, tensor.detach().sum(dtype=torch.float32)))

    def look(self, end: int | None = None) -> None:
        """Look at the batches before ``end`` less a few; at all without an ``end``."""
        ready: list[tuple[NonFinite, Tensor]] = []
        while self._sums and (end is None or self._sums[0][0].batch < end - _LAG):
            ready.append(self._sums.popleft())
        if not ready or self.first is not None:
            return
        finite = torch.stack([total for _, total in ready]).isfinite().tolist()
        bad = [where for (where, _), is_finite in zip(ready, finite, strict=True) if not is_finite]
        if bad:
            self.first = min(bad)
            self._sums.clear()
            sys.stderr.write(f"values that are not finite: {self.first}\n")

    def first_of(self, *groups: Collective) -> NonFinite | None:
        """The first of all ranks; those of every group call it."""
        self.look()
        own = [_NOTHING] * 6 if self.first is None else list(astuple(self.first))
        for group in groups:
            own = min(row.tolist() for row in group.all_gather(torch.tensor(own)))
        return None if own[0] == _NOTHING else NonFinite(*own)


def _floating(value: Value) -> Iterator[Tensor]:
    for tensor in value if isinstance(value, tuple) else (value,):
        if tensor is not None and tensor.is_floating_point():
            yield tensor
