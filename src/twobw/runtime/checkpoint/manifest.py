"""What a checkpoint is: a folder ``step-00000120`` (batches trained) with a safetensors file a rank
and ``manifest.json``.

A tensor's name in a file is ``kind/name``, where ``name`` is the parameter's in the unsplit model
and ``kind`` one of

=================  ==============================================================================
``weights``        the newest version, in full precision
``weights-1``      the version before, ``weights-2`` that before it, as layers compute on them
``extrapolated``   the newest version's extrapolated copy; ``extrapolated-1`` that of the one before
``optimizer.KEY``  ``KEY`` of the optimizer's state
``rest``           buffers and frozen parameters; those of replica ``r`` are ``rest@r`` from 1 on
=================  ==============================================================================

A tensor is never cut, so that reading by name is all that another layout takes. All else is JSON,
in the manifest. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

MANIFEST = "manifest.json"
_SCHEMA = 1
_STEP = re.compile(r"step-(\d{8,})")
_PAIRS = "(pairs)"  # the one key of a mapping whose keys are not text


class CheckpointError(ValueError):
    """A checkpoint that is damaged, does not fit, or cannot hold what it is to hold."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A parameter group: names of its parameters in the unsplit model, and its settings."""

    names: list[str]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """One optimizer of one rank.

    Attributes:
        kind: its class.
        groups: its parameter groups.
        tensors: of each parameter, the keys of its state that are tensors.
        state: of each parameter, the state that is not.
        scheduler: the state of its learning-rate scheduler, if it has one.
    """

    kind: str
    groups: list[GroupRecord]
    tensors: dict[str, list[str]]
    state: dict[str, dict[str, Any]]
    scheduler: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size, the SHA-256 of its content, the tensors in it."""

    num_bytes: int
    sha256: str
    tensors: list[str]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pipeline had come, and by what rule.

    Attributes:
        batch: batches trained: the number of the next one.
        origin: the batch from which the schedule's version rule counts.
        num_layers: of the unsplit model.
        pp: number of stages.
        dp: number of replicas.
        split: layers of each stage.
        schedule: the one in force.
        num_microbatches: of a batch, a replica.
        updates_by_microbatch: whether a version is a microbatch's rather than a batch's.
        update_lag: the one in force, given or measured.
        loss_scales: of this and the next batch, in fp16.
        good_batches: updates since the last overflow or growth of the scale, in fp16.
    """

    batch: int
    origin: int
    num_layers: int
    pp: int
    dp: int
    split: list[int]
    schedule: str
    num_microbatches: int
    updates_by_microbatch: bool
    update_lag: int | None = None
    loss_scales: list[float] | None = None
    good_batches: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint but its tensors.

    Attributes:
        progress: see there.
        files: by name.
        optimizers: of all ranks.
        notes: the caller's.
        score: the caller's, the lower the better: what the best checkpoint is chosen by.
    """

    progress: Progress
    files: dict[str, FileRecord]
    optimizers: list[OptimizerRecord]
    notes: dict[str, Any] = field(default_factory=dict)
    score: float | None = None


_MANIFESTS = TypeAdapter(Manifest)


def step_name(batch: int) -> str:
    """The folder of the checkpoint after so many batches."""
    return f"step-{batch:08}"


def step_of(name: str) -> int | None:
    """The inverse of `step_name`; ``None`` for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def encode(manifest: Manifest) -> str:
    """The text of ``manifest.json``: its content, and the content's SHA-256."""
    content = json.dumps(asdict(manifest), sort_keys=True)
    return json.dumps({"schema": _SCHEMA, "sha256": _digest(content), "content": content}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of another version of this program.
    """
    path = folder / MANIFEST
    try:
        outer = json.loads(path.read_text("utf-8"))
        schema, digest, content = outer["schema"], outer["sha256"], outer["content"]
        if schema != _SCHEMA:
            raise CheckpointError(
                f"{path} has schema {schema}; this version of twobw reads schema {_SCHEMA}"
            )
        if digest != _digest(content):
            raise CheckpointError(f"{path} is damaged: its checksum differs")
        manifest = _MANIFESTS.validate_python(json.loads(content))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint's manifest") from error
    except (json.JSONDecodeError, ValidationError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    for name in manifest.files:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name!r}, which is not in its folder")
    return replace(manifest, notes=from_json(manifest.notes))


def as_json(value: Any, what: str) -> Any:
    """A value as JSON can hold it; `from_json` is the inverse.

    Raises:
        CheckpointError: it cannot; ``what`` says whose the value is.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [as_json(item, what) for item in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: as_json(item, what) for key, item in value.items()}
        case dict():
            return {_PAIRS: [as_json(pair, what) for pair in value.items()]}
    raise CheckpointError(
        f"{what} has a {type(value).__name__} in it, which a checkpoint cannot hold: it holds "
        "tensors of the optimizer's state, numbers, text, and lists and mappings of these"
    )


def from_json(value: Any, like: Any = None) -> Any:
    """What `as_json` was given; tuples and counters where ``like`` has them."""
    if isinstance(value, dict):
        if set(value) == {_PAIRS}:
            pairs = {from_json(key): from_json(item) for key, item in value[_PAIRS]}
            return Counter(pairs) if isinstance(like, Counter) else pairs
        likes = like if isinstance(like, dict) else {}
        return {key: from_json(item, likes.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        likes_of = like if isinstance(like, (list, tuple)) and len(like) == len(value) else value
        items = [from_json(item, other) for item, other in zip(value, likes_of, strict=True)]
        return tuple(items) if isinstance(like, tuple) else items
    return value


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
