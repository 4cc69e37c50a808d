"""The text: which bytes are trained on, which are held back, and in which order they come."""

import os
import re
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twobw.training.data import DataError, TextData


def numbered(num_bytes: int) -> bytes:
    """Text in which every 4-byte aligned place is unique, so a window tells where it was cut."""
    return b"".join(f"{number:04d}".encode() for number in range(num_bytes // 4))


def write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        (folder / f"{name}.txt").write_bytes(content)
    return folder


def as_bytes(tokens: Tensor) -> bytes:
    return tokens.to(torch.uint8).numpy().tobytes()


@pytest.fixture
def text(tmp_path: Path) -> TextData:
    """40 training windows of 16 bytes and 20 bytes or so left."""
    write(tmp_path, one=numbered(1000))
    return TextData([tmp_path], sequence_length=16, validation_fraction=0.35, seed=3)


def test_targets_are_the_inputs_shifted_by_one(text: TextData) -> None:
    inputs, targets = text.batch(5, 4)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    whole = numbered(1000)
    for sample, target in zip(inputs, targets, strict=True):
        assert as_bytes(sample) + as_bytes(target[-1:]) in whole


def test_an_epoch_takes_every_training_window_once(text: TextData) -> None:
    assert text.num_windows == (650 - 1) // 16
    for epoch in range(3):
        inputs, _ = text.batch(epoch * text.num_windows, text.num_windows)
        joined = b"".join(sorted(as_bytes(sample) for sample in inputs))
        assert joined == numbered(1000)[: text.num_windows * 16]


def test_epochs_differ_in_order(text: TextData) -> None:
    first, _ = text.batch(0, text.num_windows)
    second, _ = text.batch(text.num_windows, text.num_windows)
    assert not torch.equal(first, second)


def test_a_batch_depends_on_its_place_alone(tmp_path: Path, text: TextData) -> None:
    run = [text.batch(first, 6) for first in range(0, 120, 6)]  # three epochs, crossed midway
    again = TextData([tmp_path], sequence_length=16, validation_fraction=0.35, seed=3)
    for number in reversed(range(20)):  # backwards, and from a new object
        for one, other in zip(run[number], again.batch(number * 6, 6), strict=True):
            assert torch.equal(one, other)
    samples = torch.cat([inputs for inputs, _ in run])
    assert torch.equal(samples[37:44], text.batch(37, 7)[0])  # and not on how it is cut


def test_a_batch_may_be_larger_than_an_epoch(text: TextData) -> None:
    inputs, _ = text.batch(text.num_windows, 3 * text.num_windows)
    counts = torch.unique(inputs, dim=0, return_counts=True)[1]
    assert len(counts) == text.num_windows
    assert set(counts.tolist()) == {3}


def test_the_order_differs_by_seed_and_the_split_does_not(tmp_path: Path) -> None:
    write(tmp_path, one=numbered(1000))
    one, other = (TextData([tmp_path], sequence_length=16, seed=seed) for seed in (1, 2))
    assert not torch.equal(one.batch(0, 20)[0], other.batch(0, 20)[0])
    assert torch.equal(one.train, other.train)
    assert torch.equal(one.validation, other.validation)


def test_nothing_leaks_from_training_to_validation(tmp_path: Path) -> None:
    # One file is cut in two by the split; the places in it are unique.
    write(tmp_path, one=numbered(4000), two=numbered(8000)[4000:], copy=numbered(4000))
    text = TextData([tmp_path], sequence_length=12, validation_fraction=0.3)
    assert len(text.train) + len(text.validation) == 8000  # the copy counts once
    trained = {as_bytes(row) for row in text.train.view(-1, 4)}
    held = {as_bytes(row) for row in text.validation.view(-1, 4)}
    assert not trained & held
    assert len(trained) + len(held) == 2000
    windows, targets = next(text.validation_batches(1, 64))
    assert torch.equal(windows[:, 1:], targets[:, :-1])
    assert {as_bytes(part) for part in windows.reshape(-1, 4)} <= held


def test_validation_is_spread_over_the_held_back_text(text: TextData) -> None:
    batches = list(text.validation_batches(3, 5))
    assert [inputs.shape for inputs, _ in batches] == [(5, 16)] * 3
    held = as_bytes(text.validation)
    starts = [held.index(as_bytes(row)) // 16 for inputs, _ in batches for row in inputs]
    assert starts == [index * text.num_validation_windows // 15 for index in range(15)]
    assert all(torch.equal(inputs[:, 1:], targets[:, :-1]) for inputs, targets in batches)


@pytest.mark.parametrize(
    ("num_batches", "size", "shapes"), [(0, 5, []), (9, 10, [10, 10]), (2, 99, [21])]
)
def test_validation_never_takes_a_window_twice(
    text: TextData, num_batches: int, size: int, shapes: list[int]
) -> None:
    assert text.num_validation_windows == 21
    batches = list(text.validation_batches(num_batches, size))
    assert [len(inputs) for inputs, _ in batches] == shapes
    rows = [as_bytes(row) for inputs, _ in batches for row in inputs]
    assert len(set(rows)) == len(rows)


def test_neither_names_nor_order_of_the_files_matter(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "deep").mkdir(parents=True)
    write(tmp_path / "a", one=b"x" * 100, two=b"y" * 90)
    write(tmp_path / "b" / "deep", zzz=b"x" * 100, aaa=b"y" * 90)
    folder = TextData([tmp_path / "a"], sequence_length=4)
    other = TextData([tmp_path / "b"], sequence_length=4)
    files = TextData([tmp_path / "a/two.txt", str(tmp_path / "a/one.txt")], sequence_length=4)
    assert torch.equal(folder.train, other.train)
    assert torch.equal(folder.train, files.train)
    both = TextData([tmp_path / "a", tmp_path], sequence_length=4)  # every file twice or more
    assert torch.equal(folder.train, both.train)
    assert both.num_files == 2


def test_a_folder_gives_its_text_and_a_named_file_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, text="déjà vu\n".encode() * 10, empty=b"", zeros=b"a\0" * 50)
    (tmp_path / "latin.txt").write_bytes(b"\xe9" * 30)
    (tmp_path / ".hidden").write_bytes(b"h" * 30)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_bytes(b"g" * 30)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    folder = TextData([tmp_path], sequence_length=2, validation_fraction=0.1)
    assert folder.num_files == 1
    assert len(folder.train) + len(folder.validation) == 100
    named = TextData(
        [tmp_path / "latin.txt", tmp_path / ".hidden"], sequence_length=2, validation_fraction=0.1
    )
    assert len(named.train) + len(named.validation) == 60


def test_the_default_is_the_standard_librarys_source() -> None:
    text = TextData(sequence_length=128)
    assert text.num_files > 300
    size = len(text.train) + len(text.validation)
    assert size > 5_000_000
    assert len(text.validation) == round(0.05 * size)
    whole = as_bytes(text.train) + as_bytes(text.validation)
    stdlib = Path(sysconfig.get_path("stdlib"))
    for module, is_there in [("json/decoder.py", True), ("test/test_json/test_decode.py", False)]:
        path = stdlib / module
        if path.exists():
            middle = path.read_bytes()[200:1200]
            assert (middle in whole) is is_there


def test_text_is_held_once_as_bytes(tmp_path: Path) -> None:
    write(tmp_path, one=numbered(1000))
    text = TextData([tmp_path], sequence_length=16)
    assert text.train.dtype == text.validation.dtype == torch.uint8
    assert text.train.untyped_storage().data_ptr() == text.validation.untyped_storage().data_ptr()
    assert text.train.untyped_storage().nbytes() == 1000


@pytest.mark.parametrize(
    ("sequence_length", "fraction", "said"),
    [
        (16, 0.1, "90 are to train on and 10 to validate on, .*_length \\+ 1 = 17.* 170 bytes"),
        (16, 0.875, "12 are to train on and 88 to validate on, .*_length \\+ 1 = 17.* 136 bytes"),
        (100, 0.5, "50 are to train on and 50 to validate on, .*_length \\+ 1 = 101.* 202 bytes"),
    ],
)
def test_too_little_text_is_refused(
    tmp_path: Path, sequence_length: int, fraction: float, said: str
) -> None:
    write(tmp_path, one=numbered(100))
    with pytest.raises(DataError, match=f"{tmp_path}: 100 bytes of text in 1 file .*{said}"):
        TextData([tmp_path], sequence_length=sequence_length, validation_fraction=fraction)


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.7])
def test_as_much_text_as_is_asked_for_is_enough(tmp_path: Path, fraction: float) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"give ([0-9,]+) bytes") as refused:
        TextData([path], sequence_length=128, validation_fraction=fraction)
    asked = re.search("give ([0-9,]+) bytes", str(refused.value))
    assert asked is not None
    path.write_bytes(b"x" * int(asked[1].replace(",", "")))
    TextData([path], sequence_length=128, validation_fraction=fraction)


def test_one_window_on_each_side_is_enough(tmp_path: Path) -> None:
    write(tmp_path, one=numbered(20))
    text = TextData([tmp_path], sequence_length=9, validation_fraction=0.5)
    assert (text.num_windows, text.num_validation_windows) == (1, 1)
    assert as_bytes(text.batch(0, 1)[0][0]) == b"000000010"


def test_a_path_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.txt does not exist"):
        TextData([tmp_path / "no.txt"], sequence_length=4)
    with pytest.raises(DataError, match=f"{tmp_path}: no text in this folder: 0 files"):
        TextData([tmp_path], sequence_length=4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        TextData([tmp_path / "pipe"], sequence_length=4)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.txt: 0 bytes of text in 1 file"):
        TextData([tmp_path / "empty.txt"], sequence_length=4)
    (tmp_path / "zeros").write_bytes(b"a\0")
    with pytest.raises(DataError, match=r"no text in this folder: 2 files, .* none is UTF-8"):
        TextData([tmp_path], sequence_length=4)


def test_what_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, one=numbered(100))

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")  # as root, no real file gives it

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"one\.txt cannot be read: Permission denied"):
        TextData([tmp_path], sequence_length=4)
