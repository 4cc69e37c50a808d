"""Going on with a run: from which checkpoint, and what may be other than it was."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from twobw.config import Config, ConfigError, read_resolved_config
from twobw.config.toml_text import toml_text
from twobw.runtime.checkpoint.reading import checkpoints_in, newest_whole
from twobw.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    create_run_folder,
    folders_of,
    forget_end,
    write_config,
    write_text,
)

_LAUNCHER = "torchrun.json"
_MAY_CHANGE = frozenset(
    (  # besides all of [parallel] and [checkpoint]
        "model.init_from",
        "training.global_batch_size",
        "training.recompute",
        "training.log_every",
        "training.evaluate_every",
        "training.evaluation_batches",
        "training.evaluation_batch_size",
        "training.evaluation_microbatches",
        "training.timeout_s",
        "training.num_threads",
        "training.on_divergence",
        "run.tensorboard",
    )
)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Where a run's files are, and whether it goes on from a checkpoint that is there."""

    folder: Path
    goes_on: bool


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins.

    Attributes:
        batch: number of its first batch.
        samples: trained on before; the global batch may have been another one.
        best_loss: the lowest validation loss before.
    """

    batch: int = 0
    samples: int = 0
    best_loss: float = math.inf

    def position(self, batch: int, global_batch_size: int) -> int:
        """The samples before a batch."""
        return self.samples + (batch - self.batch) * global_batch_size


def config_to_resume(folder: Path) -> tuple[Path, dict[str, str]]:
    """The file of the config that the run in a folder had, and what to set in it by dotted name:
    once there is a checkpoint, the weights that it started from need not be there.

    Raises:
        ConfigError: there is no run in the folder.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError("--resume", [f"{folder} is not the folder of a run: it has no {CONFIG}"])
    has_begun = bool(checkpoints_in(folder / CHECKPOINTS))
    return folder / CONFIG, {"model.init_from": ""} if has_begun else {}


def check_resumed(folder: Path, config: Config, data: str) -> None:
    """Make sure that a run can go on with a config: only the layout, the global batch and what is
    shown or kept may be other than they were.

    Args:
        folder: the run's.
        config: to go on with.
        data: describes the samples, as they are read now.

    Raises:
        ConfigError: something else differs.
        CheckpointError: no checkpoint of the run is whole.
    """
    problems = list(_changes(read_resolved_config(folder / CONFIG), config))
    if checkpoints_in(folder / CHECKPOINTS):
        manifest = newest_whole(folder / CHECKPOINTS).manifest
        if manifest.progress.batch >= config.training.num_batches:
            problems.append(
                f"all training.num_batches = {config.training.num_batches} batches are trained; "
                "set more"
            )
        if (before := manifest.notes["data"]) != data:
            problems.append(f"the text is not what it was: {data!r} now, {before!r} before")
    if problems:
        raise ConfigError(f"--resume {folder}", problems)


def _changes(before: Config, after: Config) -> Iterator[str]:
    """A problem for each setting that must stay."""
    old, new = before.model_dump(), after.model_dump()
    for section in ("model", "data", "optimizer", "training", "run"):
        for key, was in old[section].items():
            now = new[section][key]
            if now == was or f"{section}.{key}" in _MAY_CHANGE:
                continue
            if key == "num_batches" and after.optimizer.decay == "constant":
                continue
            hint = "; its rate falls until then" if key == "num_batches" else ""
            yield (
                f"{section}.{key} = {toml_text(now)}: was {toml_text(was)}, which a run that goes "
                f"on keeps{hint}"
            )


def open_run(config: Config, files: Mapping[str, str], resumed: Path | None) -> OpenRun:
    """Make the folder of a new run, or make that of a run ready to go on; leave the config and
    ``files`` (text by name) in it. Without a checkpoint, a run goes on from its start."""
    if resumed is None:
        folder = create_run_folder(Path(config.run.folder), config.run.name)
    else:
        folder = resumed
        forget_end(folder)
    write_config(folder, config)
    for name, text in files.items():
        write_text(folder / name, text)
    return OpenRun(folder, resumed is not None and bool(checkpoints_in(folder / CHECKPOINTS)))


def launcher_file() -> dict[str, str]:
    """What ``torchrun`` calls this start of its ranks, to be left in the run's folder."""
    return {_LAUNCHER: json.dumps({"run_id": os.environ.get("TORCHELASTIC_RUN_ID")}) + "\n"}


def folder_before_restart(config: Config) -> Path | None:
    """The folder of the run that ``torchrun`` has restarted; ``None`` where it has not, or where
    the ranks had not come so far as to make one."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    own = launcher_file()[_LAUNCHER]
    started = (
        folder
        for folder in folders_of(Path(config.run.folder), config.run.name)
        if (folder / _LAUNCHER).is_file() and (folder / _LAUNCHER).read_text("utf-8") == own
    )
    return next(started, None)
