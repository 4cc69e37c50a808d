"""The folder of one run: what lies where, and how it is written."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from twobw.config import Config, write_resolved_config

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
TIMELINE = "timeline.json"
PLAN = "plan.json"
PROFILE = "profile.json"
WEIGHTS = "weights.safetensors"
BEST_WEIGHTS = "best.safetensors"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"

NO_FILES: Mapping[str, str] = MappingProxyType({})


def create_run_folder(parent: Path, name: str) -> Path:
    """Make and return ``parent/name``, or the first free one of ``name-2``, ``name-3``, ...

    A folder that is there already is never written to; two runs that start at once get two folders.
    """
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def folders_of(parent: Path, name: str) -> list[Path]:
    """The folders that `create_run_folder` has made for this name, the newest first."""
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    found = [(match, path) for path in parent.glob("*") if (match := pattern.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda pair: -int(pair[0][1] or 1))]


def write_config(folder: Path, config: Config) -> None:
    """Leave the config in the folder of a run."""
    with replacing(folder / CONFIG) as path:
        write_resolved_config(config, path)


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank's standard error and traceback go."""
    return folder / f"rank{rank}.log"


def failure_path(folder: Path, rank: int) -> Path:
    """Where a rank that fails leaves the reason for the launcher."""
    return folder / f"rank{rank}.failure.json"


def forget_end(folder: Path) -> None:
    """Remove what tells how the run in a folder ended, since it goes on."""
    for path in (folder / SUMMARY, *folder.glob("rank*.failure.json*")):
        path.unlink(missing_ok=True)


def failure_of(folder: Path) -> str | None:
    """Why the run that has left its summary here failed; ``None`` if it did not."""
    failure: str | None = json.loads((folder / SUMMARY).read_text("utf-8"))["failure"]
    return failure


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on success it takes the place of ``path`` in one step.

    A reader sees the old file or the whole new one, even when the writer is killed.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole file in one step (see ``replacing``)."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write a value as JSON in one step (see ``replacing``)."""
    write_text(path, json.dumps(value, indent=indent) + "\n")
