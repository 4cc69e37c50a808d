"""Samples with some bytes masked, which a BERT is pre-trained to guess."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twobw.models.bert import NOT_MASKED
from twobw.training.altered import AlteredText
from twobw.training.data import TextData

NUM_BYTES = 256
MASK = NUM_BYTES  # the token that stands for a masked byte

_CHOSEN = 0.15
_MASKED = 0.8  # of those chosen
_REPLACED = 0.1


class MaskedText(AlteredText):
    """The windows of a text with bytes masked: 15 % of a window's bytes are chosen (at least
    one); of these, 80 % become the mask, 10 % another byte drawn at random, and 10 % stay (Devlin
    et al., 2019, section 3.1). Inputs and targets are int64 ``(b, t)`` each; a target is the byte
    that was in a chosen place, elsewhere `NOT_MASKED`.

    Args:
        text: what is masked.
        seed: of the masks in training.
    """

    def __init__(self, text: TextData, seed: int) -> None:
        super().__init__(text, seed, mask, streams=(0, 1))


def mask(tokens: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Choose and mask bytes of each sample.

    Args:
        tokens: ``(b, t)``, int64; left as they are.
        seeds: one for each sample.

    Returns:
        Inputs and targets, as `MaskedText` gives them.
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
