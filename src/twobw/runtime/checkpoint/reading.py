"""Checkpoints of a folder: which are whole, and their tensors by name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from twobw.runtime.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    read_manifest,
    step_of,
)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, damaged ones too, the oldest first."""
    steps = {
        path: step for path in folder.glob("step-*") if (step := step_of(path.name)) is not None
    }
    return sorted(steps, key=lambda path: steps[path])


def check_files(folder: Path, *, content: bool = True) -> Manifest:
    """Make sure that a checkpoint is whole.

    Args:
        folder: the checkpoint's.
        content: also hold each file against its checksum, which reads all of it.

    Raises:
        CheckpointError: it is not; the message names what is wrong.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != record.num_bytes:
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes, and had {record.num_bytes}"
                )
            if content and digest_of(path) != record.sha256:
                raise CheckpointError(f"{path} is damaged: its checksum differs")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return manifest


@dataclass(frozen=True, slots=True)
class Found:
    """The newest whole checkpoint of a folder, and what is wrong with those that are newer."""

    folder: Path
    manifest: Manifest
    damaged: list[CheckpointError]


def newest_whole(folder: Path) -> Found:
    """The newest checkpoint of a folder that is whole; or the folder itself, if it is one.

    Raises:
        CheckpointError: there is none; the message says what is wrong with those that are there.
    """
    candidates = [folder] if (folder / MANIFEST).is_file() else checkpoints_in(folder)
    damaged: list[CheckpointError] = []
    for candidate in reversed(candidates):
        try:
            return Found(candidate, check_files(candidate), damaged)
        except CheckpointError as error:
            damaged.append(error)
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(map(str, damaged))}")
    raise CheckpointError(f"there is no checkpoint in {folder}")


@dataclass(slots=True)
class Stored:
    """A checkpoint's tensors by name. Each file is opened when first needed."""

    folder: Path
    manifest: Manifest
    _file_of: dict[str, str] = field(init=False)
    _open: dict[str, safe_open] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        files = self.manifest.files.items()
        self._file_of = {key: name for name, record in files for key in record.tensors}

    def names(self, kind: str) -> list[str]:
        """Names, in the unsplit model, of the tensors of a kind."""
        pairs = (key.split("/", 1) for key in self._file_of)
        return [name for other, name in pairs if other == kind]

    def find(self, *kinds: str, name: str) -> Tensor | None:
        """The tensor ``name`` of the first of ``kinds`` that there is of it, on the CPU.

        Raises:
            CheckpointError: its file cannot be read.
        """
        for kind in kinds:
            if file := self._file_of.get(f"{kind}/{name}"):
                return self._read(file, f"{kind}/{name}")
        return None

    def read(self, *kinds: str, name: str) -> Tensor:
        """As `find`.

        Raises:
            CheckpointError: there is none, too.
        """
        tensor = self.find(*kinds, name=name)
        if tensor is None:
            raise CheckpointError(f"{self.folder} has no {kinds[-1]} of {name}")
        return tensor

    def _read(self, file: str, key: str) -> Tensor:
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return tensor


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
