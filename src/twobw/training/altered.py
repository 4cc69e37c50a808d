"""Samples of a text that are altered as they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from twobw.runtime.randomness import mix
from twobw.training.data import TextData

Alter = Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor]]
"""From tokens ``(b, t)`` and a seed for each sample to inputs and targets."""


class AlteredText:
    """The windows of a text, each altered anew each time that it comes. How depends on the seed and
    on the sample's place in the run alone; of a validation sample, on its place alone.

    Args:
        text: what is altered.
        seed: of what is done to it in training.
        alter: does it.
        streams: two numbers that no other alteration has, so that no sample of training is altered
            as one of validation, nor as one of another kind.
    """

    def __init__(self, text: TextData, seed: int, alter: Alter, streams: tuple[int, int]) -> None:
        self._text = text
        self._seed = seed
        self._alter = alter
        self._training, self._validation = streams

    @property
    def description(self) -> str:
        """That of the text."""
        return self._text.description

    @property
    def num_validation_windows(self) -> int:
        """Samples to validate on."""
        return self._text.num_validation_windows

    def batch(self, first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Samples ``first_sample ...`` of the run: inputs and targets."""
        tokens, _ = self._text.batch(first_sample, batch_size)
        samples = range(first_sample, first_sample + batch_size)
        return self._alter(tokens, [mix(self._training, self._seed, sample) for sample in samples])

    def validation_batches(
        self, num_batches: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the text, altered (see `batch`)."""
        first = 0
        for tokens, _ in self._text.validation_batches(num_batches, batch_size):
            samples = range(first, first + len(tokens))
            yield self._alter(tokens, [mix(self._validation, sample) for sample in samples])
            first += len(tokens)
