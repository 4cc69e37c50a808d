"""Text as bytes: which files, which of them are for validation, and which window comes when.

A token is a byte. The order of the samples is a pure function of the seed and of the sample's
position in the run, so no rank needs to keep or save any state.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import sysconfig
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


class DataError(ValueError):
    """Text that cannot be trained on."""


class Samples(Protocol):
    """What a model is trained and validated on."""

    @property
    def description(self) -> str:
        """What there is of it."""

    @property
    def num_validation_windows(self) -> int:
        """Samples to validate on, each cut from a text."""

    def batch(self, first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Samples ``first_sample ...`` of the run: inputs and targets, the samples along the
        first dimension. A function of the seed and of their places in the run alone."""

    def validation_batches(
        self, num_batches: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """At most ``num_batches`` batches of equal size: the same in every run."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A file, and the first folder on the way to it from the one that was searched, if any."""

    path: Path
    package: str = ""


@dataclass(frozen=True, slots=True)
class _File:
    """A file to train on; ``digest`` is of its content."""

    digest: bytes
    size: int
    path: Path
    package: str


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a file lies in the whole text, training bytes first: ``start <= byte < end``.

    ``package`` is the first folder on the way to it from the one that was searched; empty if there
    is none.
    """

    package: str
    start: int
    end: int


class EpochOrder:
    """An order of ``size`` things for each epoch, drawn from the seed."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._last: tuple[int, Tensor] = (-1, torch.empty(0))  # epoch, its permutation

    def take(self, first: int, count: int) -> Tensor:
        """Which things stand in the places ``first ... first + count - 1`` of all epochs, one
        after another: int64 ``(count,)``."""
        taken: list[Tensor] = []
        place, end = first, first + count
        while place < end:
            epoch, index = divmod(place, self._size)
            taken.append(self._of(epoch)[index : index + end - place])
            place += len(taken[-1])
        return torch.cat(taken)

    def _of(self, epoch: int) -> Tensor:
        """The order of an epoch; the last one asked for is kept."""
        if self._last[0] != epoch:
            seed = random.Random(f"{self._seed}/{epoch}").getrandbits(63)
            generator = torch.Generator().manual_seed(seed)
            self._last = (epoch, torch.randperm(self._size, generator=generator))
        return self._last[1]


class TextData:
    """The windows of a text: ``sequence_length`` bytes in, the same shifted by one as targets.

    The files are put in the order of their contents' hashes and joined; the last
    ``validation_fraction`` of the bytes is for validation. So the split depends on neither the
    seed nor the names or order of the files; equal files count once and cannot leak over it.
    A training window starts every ``sequence_length`` bytes. An epoch takes each of them once, in
    an order drawn from the seed.

    Attributes:
        num_files: files read, equal ones once.
        train: the training bytes, uint8.
        validation: the validation bytes, uint8.
        num_windows: training windows, the samples of an epoch.
        num_validation_windows: validation windows.
        sequence_length: bytes of a sample.
        extents: where each file lies; the one that the split cuts in two is there once.

    Args:
        paths: files, taken as they are, and folders, searched for UTF-8 text; what is hidden in
            a folder is left out. None means the source of Python's standard library.
        sequence_length: bytes of a sample.
        validation_fraction: the part of the bytes held back, above 0 and below 1.
        seed: of the order of the training windows.

    Raises:
        DataError: a path is missing or cannot be read, or there is too little text for one
            window on either side.
    """

    def __init__(
        self,
        paths: Sequence[str | Path] = (),
        *,
        sequence_length: int,
        validation_fraction: float = 0.05,
        seed: int = 0,
    ) -> None:
        files = _distinct(_text_files(paths) if paths else _standard_library_files())
        text = _join(files)
        ends = list(accumulate(file.size for file in files))
        self.extents = [
            Extent(file.package, end - file.size, end)
            for file, end in zip(files, ends, strict=True)
        ]
        num_validation = round(len(text) * validation_fraction)
        self.num_files = len(files)
        self.train, self.validation = text.tensor_split([len(text) - num_validation])
        if min(len(self.train), len(self.validation)) <= sequence_length:
            raise DataError(
                f"{_names(paths)}: {_count(len(text), 'byte')} of text in "
                f"{_count(len(files), 'file')} (equal ones count once) are too few: with "
                f"data.validation_fraction = {validation_fraction}, {len(self.train)} are to train "
                f"on and {len(self.validation)} to validate on, and each takes at least one "
                f"sample, model.sequence_length + 1 = {sequence_length + 1} bytes; give "
                f"{_enough(sequence_length + 1, validation_fraction):,} bytes, a shorter sequence "
                "or another fraction"
            )
        # Each window shares its last target with the next one's first input.
        self.num_windows = (len(self.train) - 1) // sequence_length
        self.num_validation_windows = (len(self.validation) - 1) // sequence_length
        self.sequence_length = sequence_length
        self._order = EpochOrder(self.num_windows, seed)

    @property
    def description(self) -> str:
        """How many files and bytes."""
        return (
            f"text: {self.num_files:,} files, {len(self.train):,} bytes to train on, "
            f"{len(self.validation):,} to validate"
        )

    def batch(self, first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Samples ``first_sample ...`` of the run: inputs and targets, int64 ``(b, t)`` each.

        Batch ``k`` of a run starts at sample ``k * batch_size``, in whatever epoch that lies.
        """
        windows = self._order.take(first_sample, batch_size)
        return _cut(self.train, windows, self.sequence_length)

    def validation_batches(
        self, num_batches: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """At most ``num_batches`` batches of equal size, their windows spread evenly over the
        validation text: the same in every run.

        They hold ``batch_size`` samples, or all there are if those are fewer.
        """
        size = min(batch_size, self.num_validation_windows)
        num_batches = min(num_batches, self.num_validation_windows // size)
        total = num_batches * size
        windows = torch.arange(total) * self.num_validation_windows // max(total, 1)
        for chosen in windows.reshape(num_batches, size):
            yield _cut(self.validation, chosen, self.sequence_length)


def _cut(text: Tensor, windows: Tensor, sequence_length: int) -> tuple[Tensor, Tensor]:
    """The windows' bytes, ``(b, t)`` inputs and ``(b, t)`` targets."""
    offsets = windows[:, None] * sequence_length + torch.arange(sequence_length + 1)
    tokens = text[offsets].long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _names(paths: Sequence[str | Path]) -> str:
    """The paths, for a message; of many the first."""
    if not paths:
        return "the source of Python's standard library"
    more = f" and {_count(len(paths) - 1, 'more path')}" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _enough(sample: int, validation_fraction: float) -> int:
    """Bytes of text that give both sides ``sample`` bytes."""
    return math.ceil(sample / min(validation_fraction, 1 - validation_fraction))


def _standard_library_files() -> Iterator[_Found]:
    """The source of Python's standard library, without its tests and installed packages.

    Raises:
        DataError: this Python has no source with it.
    """
    root = sysconfig.get_path("stdlib")
    files = [found for found in _walk(Path(root), _NOT_SOURCE) if found.path.suffix == ".py"]
    if not files:
        raise DataError(f"no Python source in {root}; give files or folders in data.paths")
    yield from files


def _text_files(paths: Sequence[str | Path]) -> Iterator[_Found]:
    """The files given, and those in the folders given that are UTF-8 text.

    Raises:
        DataError: a path does not exist or is neither, or a folder holds no text.
    """
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            found = list(_walk(path))
            texts = [file for file in found if _is_text(file.path)]
            if not texts:
                raise DataError(
                    f"{path}: no text in this folder: {_count(len(found), 'file')}, hidden ones "
                    "left out, of which none is UTF-8 without NUL bytes and not empty; a file that "
                    "data.paths names itself is taken as it is"
                )
            yield from texts
        elif path.is_file():
            yield _Found(path)
        else:
            what = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise DataError(f"{path} {what}; data.paths are files and folders of text")


def _walk(folder: Path, left_out: Container[str] = ()) -> Iterator[_Found]:
    """The regular files in a folder and below; hidden ones, linked folders, and folders of the
    names ``left_out`` are not looked into."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not (name.startswith(".") or name in left_out)]
        package = next(iter(Path(parent).relative_to(folder).parts), "")
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        yield from (_Found(path, package) for path in paths if path.is_file())


def _is_text(path: Path) -> bool:
    content = _read(path)
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return bool(content) and b"\0" not in content


def _distinct(found: Iterator[_Found]) -> list[_File]:
    """The files in the order of their contents' hashes, equal contents once."""
    files: dict[bytes, _File] = {}
    for file in found:
        content = _read(file.path)
        digest = hashlib.sha256(content).digest()
        files.setdefault(digest, _File(digest, len(content), file.path, file.package))
    return [files[digest] for digest in sorted(files)]


def _join(files: list[_File]) -> Tensor:
    """All bytes in one uint8 tensor. A second reading: only the tensor and one file are held."""
    text = torch.empty(sum(file.size for file in files), dtype=torch.uint8)
    start = 0
    for file in files:
        content = _read(file.path)
        if hashlib.sha256(content).digest() != file.digest:
            raise DataError(f"{file.path} changed while it was read")
        if content:
            part = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            text[start : start + file.size] = part
        start += file.size
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
