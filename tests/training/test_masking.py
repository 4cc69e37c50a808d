"""Masked bytes: how many, what becomes of them, and that it depends on nothing but their place."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from twobw.models.bert import NOT_MASKED
from twobw.training.data import TextData
from twobw.training.masking import MASK, MaskedText, mask


def letters(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(97, 123, shape, generator=generator)


@pytest.fixture
def text(tmp_path: Path) -> TextData:
    path = tmp_path / "text"
    path.write_bytes(bytes(letters(20_000).tolist()))
    return TextData([path], sequence_length=40, validation_fraction=0.2, seed=3)


@pytest.mark.parametrize(("length", "count"), [(128, 19), (40, 6), (3, 1), (1, 1)])
def test_of_each_sample_15_percent_are_targets_and_at_least_one(length: int, count: int) -> None:
    _, targets = mask(letters(5, length), range(5))
    assert (targets != NOT_MASKED).sum(1).tolist() == [count] * 5


def test_targets_are_what_was_there_and_all_else_is_shown() -> None:
    tokens = letters(50, 128)
    before = tokens.clone()
    inputs, targets = mask(tokens, range(50))
    assert torch.equal(tokens, before)
    chosen = targets != NOT_MASKED
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])


def test_of_the_chosen_80_percent_are_masked_10_replaced_and_10_left() -> None:
    tokens = letters(2000, 100)
    inputs, targets = mask(tokens, range(2000))
    chosen = targets != NOT_MASKED
    shown, was = inputs[chosen], tokens[chosen]
    assert len(shown) == 30_000
    is_masked, is_left = shown == MASK, shown == was
    assert is_masked.float().mean().item() == pytest.approx(0.8, abs=0.01)
    # a byte drawn at random is the one that was there once in 256 times
    assert is_left.float().mean().item() == pytest.approx(0.1 + 0.1 / 256, abs=0.01)
    replaced = shown[~is_masked & ~is_left]
    assert (replaced.min(), replaced.max()) == (0, 255)
    counts = torch.bincount(replaced, minlength=256)  # about 12 of each byte
    assert counts.max() < 30


def test_places_are_drawn_evenly() -> None:
    _, targets = mask(letters(4000, 20), range(4000))
    by_place = (targets != NOT_MASKED).sum(0)
    assert by_place.sum() == 4000 * 3
    assert by_place.min() > 500  # of 600 expected
    assert by_place.max() < 700


def test_a_sample_is_masked_by_its_place_and_the_seed_alone(text: TextData) -> None:
    masked = MaskedText(text, seed=5)
    inputs, targets = masked.batch(0, 12)
    parts = [MaskedText(text, seed=5).batch(first, 4) for first in (8, 4, 0)]  # as replicas take it
    assert torch.equal(inputs, torch.cat([part[0] for part in reversed(parts)]))
    assert torch.equal(targets, torch.cat([part[1] for part in reversed(parts)]))
    other = MaskedText(text, seed=6).batch(0, 12)
    assert not torch.equal(inputs, other[0])


def test_a_window_is_masked_anew_in_each_epoch(text: TextData) -> None:
    masked = MaskedText(text, seed=5)
    epochs = [masked.batch(epoch * text.num_windows, text.num_windows) for epoch in (0, 1)]
    whole = []
    for inputs, targets in epochs:
        whole.append(torch.where(targets == NOT_MASKED, inputs, targets))
    order = [sorted(range(text.num_windows), key=lambda i: w[i].tolist()) for w in whole]
    assert torch.equal(whole[0][order[0]], whole[1][order[1]])  # the same windows
    same = (epochs[0][1][order[0]] == epochs[1][1][order[1]]).all(1)
    assert same.float().mean() < 0.05


def test_validation_is_masked_alike_in_every_run(text: TextData) -> None:
    one, other = (list(MaskedText(text, seed).validation_batches(3, 7)) for seed in (1, 2))
    plain = list(text.validation_batches(3, 7))
    assert len(one) == len(plain) == 3
    for (inputs, targets), (same, same_targets), (tokens, _) in zip(one, other, plain, strict=True):
        assert torch.equal(inputs, same)
        assert torch.equal(targets, same_targets)
        assert torch.equal(torch.where(targets == NOT_MASKED, inputs, targets), tokens)
    assert not torch.equal(one[0][1] == NOT_MASKED, one[1][1] == NOT_MASKED)


def test_what_there_is_is_what_the_text_has(text: TextData) -> None:
    masked = MaskedText(text, seed=0)
    assert masked.description == text.description
    assert masked.num_validation_windows == text.num_validation_windows
