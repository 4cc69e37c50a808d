"""The loss on the validation text, and whether it is a run's lowest; the accuracy of classes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, distributed

from twobw import Pipeline
from twobw.config import Config
from twobw.training.data import Samples
from twobw.training.placement import Placement
from twobw.training.samples import validation_batch


class Evaluation:
    """Evaluates a pipeline as the config says.

    Attributes:
        best_loss: the lowest that `is_best` was given.

    Args:
        config: of the run.
        data: its samples.
        pipeline: what is trained.
        placement: which part of a batch this rank takes.

    Raises:
        DataError: the validation text has too few samples for the replicas.
    """

    def __init__(
        self, config: Config, data: Samples, pipeline: Pipeline, placement: Placement
    ) -> None:
        self._data = data
        self._pipeline = pipeline
        self._placement = placement
        self._num_batches = config.training.evaluation_batches
        self._size, self._num_microbatches = validation_batch(config, data)
        self._has_classes = config.model.num_classes > 0
        self.best_loss = math.inf

    def loss(self) -> float | None:
        """The mean over the validation batches, the same on every rank; all ranks call it.
        ``None`` where none was asked for."""
        losses = [
            self._pipeline.evaluate(*batch, num_microbatches=self._num_microbatches)
            for batch in self._batches()
        ]
        return sum(losses) / len(losses) if losses else None

    def accuracy(self) -> float | None:
        """The part of the validation samples whose class has the highest score, the same on every
        rank; all ranks call it. ``None`` where the model tells no classes or none was asked for.
        """
        if not (self._has_classes and self._num_batches):
            return None
        counts = torch.zeros(2, device=self._placement.device)  # those that are right, and all
        for inputs, targets in self._batches():
            scores = self._pipeline.forward(inputs, self._num_microbatches)
            if isinstance(scores, Tensor) and targets is not None:
                counts += counts.new_tensor([(scores.argmax(1) == targets).sum(), len(targets)])
        distributed.all_reduce(counts)
        return float(counts[0] / counts[1])

    def is_best(self, loss: float | None) -> bool:
        """Take in a loss; whether it is lower than all before."""
        if loss is None or not loss < self.best_loss:
            return False
        self.best_loss = loss
        return True

    def _batches(self) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """This rank's part of each validation batch."""
        for inputs, targets in self._data.validation_batches(self._num_batches, self._size):
            first, count = self._placement.part(len(inputs))
            part = slice(first, first + count)
            yield self._placement.needed((inputs[part], targets[part]))
