"""Snippets and their packages: balanced, cut within files, and never trained on where validated."""

from pathlib import Path

import pytest
import torch

from twobw.training.classification import PackageSnippets
from twobw.training.data import DataError, TextData

LENGTH = 8


def write(folder: Path, **packages: int) -> Path:
    """For each package so many files of 100 bytes, in which every 8 bytes from the start name the
    package, the file and the place."""
    for name, count in packages.items():
        (folder / name / "deep").mkdir(parents=True)
        for file in range(count):
            text = "".join(f"{name}{file:02d}{place:04d}" + "|" for place in range(12)) + "tail"
            (folder / name / "deep" / f"{file}.txt").write_text(text)
    (folder / "loose.txt").write_text("of no package " * 30)
    return folder


def text_of(folder: Path, fraction: float = 0.3, seed: int = 0) -> TextData:
    return TextData([folder], sequence_length=LENGTH, validation_fraction=fraction, seed=seed)


def words(inputs: torch.Tensor) -> list[str]:
    return [bytes(row.tolist()).decode() for row in inputs]


@pytest.fixture
def text(tmp_path: Path) -> TextData:
    return text_of(write(tmp_path, a=30, b=25, c=20, d=2))


def test_a_snippet_is_of_the_package_that_its_class_names(text: TextData) -> None:
    data = PackageSnippets(text, num_classes=3)
    assert sorted(data.packages) == ["a", "b", "c"]
    inputs, targets = data.batch(0, data.num_labelled)
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert inputs.shape == (data.num_labelled, LENGTH)
    for x, classes in [(inputs, targets), *data.validation_batches(99, 10)]:
        words_ = words(x)
        assert [word[0] for word in words_] == [data.packages[c] for c in classes]
        assert all(word[-1] == "|" for word in words_)  # cut from the start of a file


def test_classes_are_balanced(text: TextData) -> None:
    data = PackageSnippets(text, num_classes=3, samples_per_class=17)
    assert data.num_labelled == 51
    _, targets = data.batch(0, 51)
    assert torch.bincount(targets).tolist() == [17, 17, 17]
    (_, classes), *_ = data.validation_batches(1, 30)
    assert torch.bincount(classes).tolist() == [10, 10, 10]


def test_no_file_is_both_trained_on_and_validated_on(text: TextData) -> None:
    data = PackageSnippets(text, num_classes=3)
    inputs, _ = data.batch(0, data.num_labelled)
    trained = {word[:3] for word in words(inputs)}
    held = {word[:3] for x, _ in data.validation_batches(99, 1) for word in words(x)}
    assert trained
    assert held
    assert not trained & held
    bytes_trained_on = bytes(text.train.tolist()).decode()
    assert not [file for file in held if file + "0000" in bytes_trained_on]


def test_an_epoch_takes_every_labelled_snippet_once(text: TextData) -> None:
    data = PackageSnippets(text, num_classes=3, samples_per_class=20)
    epochs = [words(data.batch(epoch * 60, 60)[0]) for epoch in range(2)]
    assert len(set(epochs[0])) == 60
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_a_batch_depends_on_its_place_alone(tmp_path: Path, text: TextData) -> None:
    data = PackageSnippets(text, num_classes=3, samples_per_class=5, seed=4)
    again = PackageSnippets(text_of(tmp_path), num_classes=3, samples_per_class=5, seed=4)
    whole = data.batch(7, 30)
    parts = [again.batch(first, 10) for first in (27, 17, 7)]
    for column in (0, 1):
        assert torch.equal(whole[column], torch.cat([part[column] for part in reversed(parts)]))


def test_the_seed_draws_the_labelled_and_leaves_validation_as_it_is(tmp_path: Path) -> None:
    text = text_of(write(tmp_path, a=30, b=25, c=20))
    one, other = (
        PackageSnippets(text, num_classes=3, samples_per_class=10, seed=s) for s in (1, 2)
    )
    assert set(words(one.batch(0, 30)[0])) != set(words(other.batch(0, 30)[0]))
    for batch, same in zip(
        one.validation_batches(3, 9), other.validation_batches(3, 9), strict=True
    ):
        assert torch.equal(batch[0], same[0])
        assert torch.equal(batch[1], same[1])


def test_validation_is_spread_and_takes_no_snippet_twice(text: TextData) -> None:
    data = PackageSnippets(text, num_classes=3)
    batches = list(data.validation_batches(99, 10))
    assert len(batches) == data.num_validation_windows // 10
    taken = [word for inputs, _ in batches for word in words(inputs)]
    assert len(set(taken)) == len(taken)
    ((inputs, _),) = data.validation_batches(1, 12)
    assert len({word[:3] for word in words(inputs)}) > 6  # files, not snippets side by side
    assert list(data.validation_batches(0, 10)) == []
    ((inputs, _),) = data.validation_batches(1, 10_000)
    assert len(inputs) == data.num_validation_windows


def test_the_classes_are_the_packages_with_the_most_files_on_both_sides(text: TextData) -> None:
    by_package: dict[str, list[int]] = {}  # files that start in training, and those that do not
    for extent in text.extents:
        if extent.package:
            counts = by_package.setdefault(extent.package, [0, 0])
            counts[extent.start >= len(text.train)] += 1
    most = sorted(by_package, key=lambda name: (-min(by_package[name]), name))
    assert min(by_package[most[1]]) > min(by_package[most[3]])
    for count in (2, 3):
        assert PackageSnippets(text, num_classes=count).packages == tuple(most[:count])


def test_more_classes_or_snippets_than_there_are_is_refused(text: TextData) -> None:
    with pytest.raises(DataError, match=r"num_classes is 9, but only \d packages have files"):
        PackageSnippets(text, num_classes=9)
    with pytest.raises(DataError, match=r"samples_per_class is 999, but .* only \d+; set at most"):
        PackageSnippets(text, num_classes=3, samples_per_class=999)


def test_the_standard_library_has_packages_to_tell_apart() -> None:
    text = TextData(sequence_length=128, validation_fraction=0.25)
    data = PackageSnippets(text, num_classes=8, samples_per_class=64)
    assert data.num_labelled == 512
    assert data.num_validation_windows > 800
    assert {"asyncio", "email"} <= set(data.packages)
    assert "asyncio" in data.description
    assert "512 labelled snippets" in data.description
