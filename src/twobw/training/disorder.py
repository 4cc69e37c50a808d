"""Samples in or out of order, which a BERT is taught to tell apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from twobw.runtime.randomness import mix
from twobw.training.data import TextData

ORDERS = ("as written", "bytes exchanged", "words exchanged")

_EXCHANGED = 0.25  # of the pairs of bytes

_TRAINING, _VALIDATION = 2, 3  # 0 and 1 seed masks


class DisorderedText:
    """The windows of a text, of which some are put out of order, and how: a small sister of the
    question whether a sentence is acceptable (Warstadt et al., 2019, CoLA).

    All classes have the same bytes: how often each occurs tells nothing, only what stands beside
    what. What becomes of a window depends on the seed and on the sample's place in the run alone;
    of a validation sample, on its place alone.

    Args:
        text: what is put out of order.
        seed: of the disorder in training.
    """

    def __init__(self, text: TextData, seed: int) -> None:
        self._text = text
        self._seed = seed

    @property
    def description(self) -> str:
        """The text and the classes."""
        return f"{self._text.description}\nclasses: {', '.join(ORDERS)}"

    @property
    def num_validation_windows(self) -> int:
        """Samples to validate on."""
        return self._text.num_validation_windows

    def batch(self, first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Samples ``first_sample ...`` of the run: inputs ``(b, t)`` and classes ``(b,)``, int64.

        A class is a number of `ORDERS`, drawn anew each time that a window comes.
        """
        tokens, _ = self._text.batch(first_sample, batch_size)
        samples = range(first_sample, first_sample + batch_size)
        return put_out_of_order(tokens, [mix(_TRAINING, self._seed, sample) for sample in samples])

    def validation_batches(
        self, num_batches: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the text, put out of order (see `batch`)."""
        first = 0
        for tokens, _ in self._text.validation_batches(num_batches, batch_size):
            samples = range(first, first + len(tokens))
            yield put_out_of_order(tokens, [mix(_VALIDATION, sample) for sample in samples])
            first += len(tokens)


def put_out_of_order(tokens: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw the class of each sample and change the sample to be of it.

    Args:
        tokens: ``(b, t)``, int64, bytes; left as they are.
        seeds: one for each sample.

    Returns:
        Inputs and classes, as `DisorderedText.batch`.
    """
    generator = torch.Generator()
    rows, classes = [], []
    for row, seed in zip(tokens, seeds, strict=True):
        generator.manual_seed(seed)
        order = int(torch.randint(len(ORDERS), (1,), generator=generator))
        changed = (row, exchange_bytes(row, generator), exchange_words(row))
        rows.append(changed[order])
        classes.append(order)
    return torch.stack(rows), torch.tensor(classes)


def exchange_bytes(row: Tensor, generator: torch.Generator) -> Tensor:
    """Bytes ``(t,)`` with a quarter of their pairs, drawn at random, turned round."""
    pairs = row[: len(row) // 2 * 2].reshape(-1, 2).clone()
    chosen = torch.randperm(len(pairs), generator=generator)[: round(_EXCHANGED * len(pairs))]
    pairs[chosen] = pairs[chosen].flip(1)
    return torch.cat([pairs.flatten(), row[len(row) // 2 * 2 :]])


def exchange_words(row: Tensor) -> Tensor:
    """Bytes ``(t,)`` with the first and second word, third and fourth, and so on, exchanged; a
    word is letters, digits and underscores, and what stands between words keeps its order."""
    parts = re.split(rb"(\w+)", bytes(row.tolist()))  # words have the odd places
    end = len(parts) // 4 * 4
    parts[1:end:4], parts[3:end:4] = parts[3:end:4], parts[1:end:4]
    return torch.tensor(list(b"".join(parts)))
