"""Text in and out of order: the same bytes, and a disorder that depends on the place alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from twobw.training.data import TextData
from twobw.training.disorder import (
    ORDERS,
    DisorderedText,
    exchange_bytes,
    exchange_words,
    put_out_of_order,
)


def row(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


def words(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode()


@pytest.fixture
def text(tmp_path: Path) -> TextData:
    path = tmp_path / "text"
    path.write_text(
        "".join(f"def word{line}(of, the, {line * line}): pass\n" for line in range(900))
    )
    return TextData([path], sequence_length=41, validation_fraction=0.2, seed=3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if a_1 == b2: return", "a_1 if == return: b2"),
        ("(one, two, three)", "(two, one, three)"),
        ("  x", "  x"),
        ("!? ()", "!? ()"),
        ("", ""),
    ],
)
def test_every_two_words_change_places(before: str, after: str) -> None:
    assert words(exchange_words(row(before))) == after


def test_a_quarter_of_the_pairs_of_bytes_is_turned_round() -> None:
    before = torch.arange(129)
    after = exchange_bytes(before, torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.arange(129))
    pairs = after[:128].reshape(64, 2)
    turned = pairs[:, 0] > pairs[:, 1]
    assert turned.sum() == 16
    assert torch.equal(torch.where(turned[:, None], pairs.flip(1), pairs).flatten(), before[:128])
    assert after[128] == 128


def test_classes_are_drawn_evenly_and_have_the_same_bytes(text: TextData) -> None:
    tokens, _ = text.batch(0, 600)
    before = tokens.clone()
    inputs, classes = put_out_of_order(tokens, range(600))
    assert torch.equal(tokens, before)
    assert (inputs.dtype, classes.dtype) == (torch.int64, torch.int64)
    assert torch.bincount(classes, minlength=3).min() > 160
    assert torch.equal(inputs.sort(1).values, tokens.sort(1).values)
    is_changed = (inputs != tokens).any(1)
    assert torch.equal(is_changed, classes > 0)


def test_each_class_is_what_its_name_says(text: TextData) -> None:
    tokens, _ = text.batch(0, 60)
    inputs, classes = put_out_of_order(tokens, range(60))
    assert ORDERS[2] == "words exchanged"
    for before, after, order in zip(tokens, inputs, classes, strict=True):
        assert torch.equal(after, exchange_words(before)) is bool(order == 2)


def test_a_sample_depends_on_its_place_and_the_seed_alone(text: TextData) -> None:
    whole = DisorderedText(text, seed=5).batch(0, 12)
    parts = [DisorderedText(text, seed=5).batch(first, 4) for first in (8, 4, 0)]
    for column in (0, 1):
        assert torch.equal(whole[column], torch.cat([part[column] for part in reversed(parts)]))
    assert not torch.equal(whole[1], DisorderedText(text, seed=6).batch(0, 12)[1])


def test_validation_is_alike_in_every_run(text: TextData) -> None:
    one, other = (list(DisorderedText(text, seed).validation_batches(3, 7)) for seed in (1, 2))
    assert len(one) == len(other) == 3
    for batch, same in zip(one, other, strict=True):
        assert torch.equal(batch[0], same[0])
        assert torch.equal(batch[1], same[1])
    assert not torch.equal(one[0][1], one[1][1])


def test_what_there_is_names_the_classes(text: TextData) -> None:
    data = DisorderedText(text, seed=0)
    assert data.num_validation_windows == text.num_validation_windows
    assert data.description.endswith("classes: as written, bytes exchanged, words exchanged")
