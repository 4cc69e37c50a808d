"""`Saving`: checkpoints of a pipeline, written behind its training, and loaded on any layout."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from twobw.runtime.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    as_json,
    step_name,
)
from twobw.runtime.checkpoint.reading import Stored, check_files, newest_whole
from twobw.runtime.checkpoint.writing import CheckpointWriter, Job, Keep
from twobw.runtime.rank import Rank

Result = TypeVar("Result")

_ITSELF = -1  # the folder is a checkpoint, and does not hold some


class Call(Protocol):
    """Calls a function for each rank of this process, on its own thread."""

    def __call__(self, function: Callable[[Rank], Result]) -> list[Result]:
        """The results, by rank."""


class Saving:
    """What `Pipeline.save` and `Pipeline.load` do.

    Args:
        ranks: of this process: all there are, or one of a process group.
        call: calls a function for each of them.
        split: layers of each stage.
        timeout: seconds that rank 0 waits for the other ranks' files.
    """

    def __init__(
        self, ranks: Sequence[Rank], call: Call, split: Sequence[int], timeout: float
    ) -> None:
        self._first = ranks[0]
        self._call = call
        self._split = split
        self._num_ranks = self._first.mesh.pp * self._first.mesh.dp
        self._is_distributed = dist.is_available() and dist.is_initialized()
        self._writer = CheckpointWriter(commits=self._first.mesh.rank == 0, timeout=timeout)
        self._token: str | None = None

    def save(self, folder: Path, notes: Mapping[str, Any], score: float | None, keep: Keep) -> None:
        """See `Pipeline.save`."""
        checked = as_json(dict(notes), "the notes")
        self._writer.wait()
        parts = self._call(lambda rank: rank.part())
        if self._token is None:
            self._token = f"{self._from_rank_0(secrets.randbits(62)):x}"
        self._writer.begin(
            Job(
                folder=folder,
                token=self._token,
                num_ranks=self._num_ranks,
                parts=parts,
                progress=self._first.progress(self._split),
                notes=checked,
                score=score,
                keep=keep,
            )
        )

    def wait(self) -> None:
        """See `Pipeline.wait_until_saved`."""
        self._writer.wait()

    def load(self, folder: Path) -> Manifest:
        """See `Pipeline.load`."""
        step = self._from_rank_0(self._together(lambda: self._newest_step(folder)))
        path = folder if step == _ITSELF else folder / step_name(step)
        manifest = self._together(lambda: self._manifest_of(path))

        def restore() -> None:
            self._call(lambda rank: rank.restore(Stored(path, manifest)))

        self._together(restore)
        return manifest

    def _newest_step(self, folder: Path) -> int:
        """On rank 0, which checkpoint of the folder to load, or that the folder is one itself."""
        if self._first.mesh.rank > 0:
            return _ITSELF
        found = newest_whole(folder)
        for damage in found.damaged:
            warnings.warn(f"{damage}; {found.folder} is used", stacklevel=5)
        return _ITSELF if found.folder == folder else found.manifest.progress.batch

    def _manifest_of(self, path: Path) -> Manifest:
        """The manifest of a checkpoint that rank 0 has read to the end."""
        manifest = check_files(path, content=False)
        theirs, ours = manifest.progress.num_layers, sum(self._split)
        if theirs != ours:
            raise CheckpointError(f"{path} is of a model of {theirs} layers; this one has {ours}")
        return manifest

    def _from_rank_0(self, number: int) -> int:
        """Rank 0's number, on every rank."""
        if not self._is_distributed:
            return number
        tensor = torch.tensor([number], device=self._first.mesh.device)
        dist.broadcast(tensor, 0)
        return int(tensor.item())

    def _together(self, function: Callable[[], Result]) -> Result:
        """What the function gives; where it fails on one rank, an error on every rank."""
        if not self._is_distributed:
            return function()
        results, problem = [], None
        try:
            results.append(function())
        except CheckpointError as error:
            problem = error
        has_failed = torch.tensor([float(problem is not None)], device=self._first.mesh.device)
        dist.all_reduce(has_failed, dist.ReduceOp.MAX)
        if has_failed.item():
            raise problem or CheckpointError("another rank cannot load the checkpoint")
        return results[0]
