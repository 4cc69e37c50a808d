"""Which part of a batch a rank takes, and which of it it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twobw.training.device import move


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank's place.

    Attributes:
        replica: 0-based.
        num_replicas: of each stage.
        needs_inputs: whether the rank has the first stage.
        needs_targets: whether it has the last.
        device: where its stage is.
    """

    replica: int
    num_replicas: int
    needs_inputs: bool
    needs_targets: bool
    device: torch.device

    def part(self, num_samples: int) -> tuple[int, int]:
        """First sample and number of samples of this replica's part of a batch. The parts are in
        order and as even as can be, as ``torch.tensor_split`` cuts."""
        size, larger = divmod(num_samples, self.num_replicas)
        first = self.replica * size + min(self.replica, larger)
        return first, size + (self.replica < larger)

    def needed(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """The inputs on the first stage and the targets on the last, on the rank's device."""
        inputs, targets = batch
        return (
            move(inputs, self.device) if self.needs_inputs else None,
            move(targets, self.device) if self.needs_targets else None,
        )
