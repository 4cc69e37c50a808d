"""Samples with some bytes masked, which a BERT is pre-trained to guess."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from twobw.models.bert import NOT_MASKED
from twobw.runtime.randomness import mix
from twobw.training.data import TextData

NUM_BYTES = 256
MASK = NUM_BYTES  # the token that stands for a masked byte

_CHOSEN = 0.15
_MASKED = 0.8  # of those chosen
_REPLACED = 0.1

_TRAINING, _VALIDATION = 0, 1  # so that no sample of one is masked as one of the other


class MaskedText:
    """The windows of a text with bytes masked: 15 % of a window's bytes are chosen (at least
    one); of these, 80 % become the mask, 10 % another byte drawn at random, and 10 % stay (Devlin
    et al., 2019, section 3.1).

    A window is masked anew each time that it comes. How depends on the seed and on the sample's
    place in the run alone; of a validation sample, on its place alone.

    Args:
        text: what is masked.
        seed: of the masks in training.
    """

    def __init__(self, text: TextData, seed: int) -> None:
        self._text = text
        self._seed = seed

    @property
    def description(self) -> str:
        """That of the text."""
        return self._text.description

    @property
    def num_validation_windows(self) -> int:
        """Samples to validate on."""
        return self._text.num_validation_windows

    def batch(self, first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Samples ``first_sample ...`` of the run: inputs and targets, int64 ``(b, t)`` each.

        A target is the byte that was in a chosen place, elsewhere `NOT_MASKED`.
        """
        tokens, _ = self._text.batch(first_sample, batch_size)
        samples = range(first_sample, first_sample + batch_size)
        return mask(tokens, [mix(_TRAINING, self._seed, sample) for sample in samples])

    def validation_batches(
        self, num_batches: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the text, masked (see `batch`)."""
        first = 0
        for tokens, _ in self._text.validation_batches(num_batches, batch_size):
            samples = range(first, first + len(tokens))
            yield mask(tokens, [mix(_VALIDATION, sample) for sample in samples])
            first += len(tokens)


def mask(tokens: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Choose and mask bytes of each sample.

    Args:
        tokens: ``(b, t)``, int64; left as they are.
        seeds: one for each sample.

    Returns:
        Inputs and targets, as `MaskedText.batch`.
    """
    length = tokens.shape[1]
    count = max(1, round(_CHOSEN * length))
    generator = torch.Generator()
    rows = []
    for seed in seeds:
        generator.manual_seed(seed)
        places = torch.randperm(length, generator=generator)[:count]
        fate = torch.rand(count, generator=generator)
        others = torch.randint(NUM_BYTES, (count,), generator=generator)
        rows.append((places, fate, others))
    places, fate, others = (torch.stack(column) for column in zip(*rows, strict=True))
    chosen = tokens.gather(1, places)
    shown = torch.where(fate < _MASKED + _REPLACED, others, chosen)
    shown = torch.where(fate < _MASKED, MASK, shown)
    targets = torch.full_like(tokens, NOT_MASKED)
    return tokens.scatter(1, places, shown), targets.scatter(1, places, chosen)
