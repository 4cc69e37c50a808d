"""Samples in or out of order, which a BERT is taught to tell apart."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from twobw.training.altered import AlteredText
from twobw.training.data import TextData

ORDERS = ("as written", "bytes exchanged", "words exchanged")

_EXCHANGED = 0.25  # of the pairs of bytes


class DisorderedText(AlteredText):
    """The windows of a text, of which some are put out of order, and how: a small sister of the
    question whether a sentence is acceptable (Warstadt et al., 2019, CoLA). Inputs are int64
    ``(b, t)``, targets int64 ``(b,)``: numbers of `ORDERS`.

    All classes have the same bytes: how often each occurs tells nothing, only what stands beside
    what.

    Args:
        text: what is put out of order.
        seed: of the disorder in training.
    """

    def __init__(self, text: TextData, seed: int) -> None:
        super().__init__(text, seed, put_out_of_order, streams=(2, 3))

    @property
    def description(self) -> str:
        """The text and the classes."""
        return f"{super().description}\nclasses: {', '.join(ORDERS)}"


def put_out_of_order(tokens: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw the class of each sample and change the sample to be of it.

    Args:
        tokens: ``(b, t)``, int64, bytes; left as they are.
        seeds: one for each sample.

    Returns:
        Inputs and classes, as `DisorderedText` gives them.
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
