"""Writing a checkpoint: every rank its file, rank 0 the manifest, then one rename.

Files go to a hidden folder beside the checkpoints. A rank's record (or why it failed) follows its
file; when all are there, rank 0 makes the manifest of them and renames the folder. So the ranks
need no collective for it, only a file system that they share, and whatever is named as a
checkpoint was written to the end.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from twobw.runtime.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    OptimizerRecord,
    Progress,
    encode,
    read_manifest,
    step_name,
    step_of,
)
from twobw.runtime.checkpoint.reading import checkpoints_in, digest_of

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay when a new one is there.

    Attributes:
        last: so many of the newest; 0: all.
        every: also those after a multiple of so many batches; 0: none for that.
        best: also the one with the lowest score.
    """

    last: int = 0
    every: int = 0
    best: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank gives to a checkpoint; its tensors are copies on the CPU."""

    rank: int
    tensors: dict[str, Tensor]
    optimizers: list[OptimizerRecord]


@dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint to be written.

    Attributes:
        folder: where checkpoints are.
        token: the same on all ranks of a run and on no other's: of the hidden folder's name.
        num_ranks: that have part in it.
        parts: of this process's ranks.
        progress: of the pipeline.
        notes: see `Manifest`.
        score: see `Manifest`.
        keep: what stays beside it.
    """

    folder: Path
    token: str
    num_ranks: int
    parts: list[Part]
    progress: Progress
    notes: dict[str, Any]
    score: float | None
    keep: Keep

    @property
    def hidden(self) -> Path:
        """Where it is written."""
        return self.folder / f".{step_name(self.progress.batch)}.{self.token}"


@dataclass(frozen=True, slots=True)
class _PartRecord:
    file: FileRecord
    optimizers: list[OptimizerRecord]


_PART_RECORDS = TypeAdapter(_PartRecord)


class CheckpointWriter:
    """Writes checkpoints on a thread, one after another. What keeps one from being written is
    warned of, and training goes on.

    Args:
        commits: whether this process has rank 0.
        timeout: seconds that rank 0 waits for the other ranks' files.
    """

    def __init__(self, *, commits: bool, timeout: float) -> None:
        self._commits = commits
        self._timeout = timeout
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, job: Job) -> None:
        """Write a checkpoint, when the one before is written."""
        self.wait()
        self._thread = Thread(target=self._run, args=[job], name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def _run(self, job: Job) -> None:
        try:
            for part in job.parts:
                _write_part_or_say_why(job.hidden, part)
            if self._commits:
                _commit_or_warn(job, self._timeout)
        except BaseException as error:  # for whoever waits
            self._failure = error


def _write_part_or_say_why(folder: Path, part: Part) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_part(folder, part)
    except (OSError, SafetensorError, CheckpointError) as error:
        with suppress(OSError):  # room for the reason
            _tensors_path(folder, part.rank).unlink(missing_ok=True)
        with suppress(OSError):
            _write(_failure_path(folder, part.rank), str(error))


def write_part(folder: Path, part: Part) -> None:
    """Write a rank's tensors, then its record.

    Raises:
        OSError, SafetensorError: there is no room, say.
        CheckpointError: newest weights that are not finite, which nobody wants to go on from.
    """
    for key, tensor in part.tensors.items():
        if key.startswith("weights/") and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{key.partition('/')[2]} is not finite")
    path = _tensors_path(folder, part.rank)
    save_file(part.tensors, path)
    _sync(path)
    file = FileRecord(path.stat().st_size, digest_of(path), list(part.tensors))
    record = json.dumps(asdict(_PartRecord(file, part.optimizers)))
    _write(_record_path(folder, part.rank), record)


def _commit_or_warn(job: Job, timeout: float) -> None:
    try:
        _remove_hidden(job.folder, job.token)
        _commit(job, timeout)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(job.hidden, ignore_errors=True)
        warnings.warn(
            f"no checkpoint after batch {job.progress.batch}: {error}; those in {job.folder} stay",
            stacklevel=1,
        )
        return
    for path in superfluous(job.folder, job.keep):
        try:
            _remove(path)
        except OSError as error:
            warnings.warn(f"{path} cannot be removed: {error}", stacklevel=1)


def _commit(job: Job, timeout: float) -> None:
    records = _wait_for_parts(job.hidden, job.num_ranks, timeout)
    files = {_tensors_path(job.hidden, rank).name: r.file for rank, r in enumerate(records)}
    optimizers = [optimizer for record in records for optimizer in record.optimizers]
    manifest = Manifest(job.progress, files, optimizers, job.notes, job.score)
    _write(job.hidden / MANIFEST, encode(manifest))
    for rank in range(job.num_ranks):
        _record_path(job.hidden, rank).unlink()
    _sync(job.hidden)
    final = job.folder / step_name(job.progress.batch)
    if final.exists():
        _remove(final)
    job.hidden.rename(final)
    _sync(job.folder)


def _wait_for_parts(folder: Path, num_ranks: int, timeout: float) -> list[_PartRecord]:
    """Every rank's record.

    Raises:
        CheckpointError: some rank has failed to write its file, or has not within the time-out.
    """
    deadline = time.monotonic() + timeout
    missing = set(range(num_ranks))
    failed: list[str] = []
    while True:
        for rank in sorted(missing):
            if (path := _failure_path(folder, rank)).is_file():
                failed.append(f"rank {rank} could not write its part ({path.read_text('utf-8')})")
            elif not _record_path(folder, rank).is_file():
                continue
            missing.remove(rank)
        if not missing:
            break
        if time.monotonic() > deadline:
            late = f"nothing from ranks {sorted(missing)} within {timeout:g} s"
            raise CheckpointError("; ".join([*failed, late]))
        time.sleep(_POLL_S)
    if failed:
        raise CheckpointError("; ".join(failed))
    paths = [_record_path(folder, rank) for rank in range(num_ranks)]
    return [_PART_RECORDS.validate_json(path.read_bytes()) for path in paths]


def superfluous(folder: Path, keep: Keep) -> list[Path]:
    """The checkpoints of a folder that need not stay."""
    paths = checkpoints_in(folder)
    if not keep.last:
        return []
    kept = set(paths[-keep.last :])
    if keep.every:
        kept |= {path for path in paths if (step_of(path.name) or 0) % keep.every == 0}
    if keep.best and (best := _best(paths)):
        kept.add(best)
    return [path for path in paths if path not in kept]


def _best(paths: Sequence[Path]) -> Path | None:
    scores: dict[Path, float] = {}
    for path in paths:
        with suppress(CheckpointError):  # a damaged one is not the best
            if (score := read_manifest(path).score) is not None:
                scores[path] = score
    return min(scores, key=lambda path: scores[path], default=None)


def _remove(path: Path) -> None:
    """In one step for whoever looks for checkpoints."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _remove_hidden(folder: Path, token: str) -> None:
    """What an earlier run has left unfinished."""
    for path in folder.glob(".step-*"):
        if not path.name.endswith(token):
            shutil.rmtree(path, ignore_errors=True)


def _tensors_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.safetensors"


def _record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.failed"


def _write(path: Path, text: str) -> None:
    """A small file, whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.rename(path)


def _sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
