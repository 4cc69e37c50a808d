"""What a run needs of the machine it starts on: files, and packages that are optional."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from twobw.config.settings import DataSettings, ModelSettings, RunSettings, Section, nearest
from twobw.config.toml_text import toml_text


def not_at_hand(
    model: ModelSettings | None = None,
    data: DataSettings | None = None,
    run: RunSettings | None = None,
    **_: Section,
) -> Iterator[str]:
    """A problem for each thing that is not there; a section in error is left out."""
    if model and model.init_from:
        path = Path(model.init_from).expanduser()
        if not path.is_file():
            what = "is a folder; give a file of weights in it" if path.is_dir() else "no such file"
            near = "" if path.is_dir() else nearest_path(path)
            yield f"model.init_from = {toml_text(model.init_from)}: {what}{near}"
    for index, text in enumerate(data.paths if data else ()):
        path = Path(text).expanduser()
        if not path.exists():
            near = nearest_path(path)
            yield f"data.paths[{index}] = {toml_text(text)}: no such file or folder{near}"
    if run and (problem := _folder_problem(Path(run.folder))):
        yield f"run.folder = {toml_text(run.folder)}: {problem}"
    if run and run.tensorboard and find_spec("tensorboard") is None:
        yield (
            "run.tensorboard = true: the package tensorboard is not installed; "
            "pip install tensorboard, or set it to false"
        )


def _folder_problem(folder: Path) -> str | None:
    """Why there can be no results in a folder, which need not be there yet."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a folder; give one that is, or that can be made"
    if not os.access(there, os.W_OK):
        return f"{there} cannot be written to; give another folder"
    return None


def nearest_path(path: Path, pattern: str = "*") -> str:
    """A hint at the nearest sibling of a path that is not there; empty if none is near."""
    siblings = {other.name: other for other in sorted(path.parent.glob(pattern))}
    near = nearest(path.name, siblings)
    return f"; did you mean {siblings[near[0]]}?" if near else ""
