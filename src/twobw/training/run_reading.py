"""Reading the folder of a run back."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from twobw.core.timeline import Timeline
from twobw.planner.plan import Plan, load_plan
from twobw.reports.perfetto import load_timeline
from twobw.training.run_folder import CONFIG, METRICS, PLAN, SUMMARY, TIMELINE


class _Part(BaseModel):
    """The part of what a file has that is read."""

    model_config = ConfigDict(frozen=True)


class StagePeak(_Part):
    """Of a line of ``metrics.jsonl``, what is there for each stage."""

    peak_bytes: int


class Batch(_Part):
    """Of a line of ``metrics.jsonl``; see `twobw.training.metrics.BatchRow`."""

    batch: int
    loss: float | None
    tokens_per_second: float
    stages: tuple[StagePeak, ...]


class Validation(_Part):
    """Likewise; see `twobw.training.metrics.ValidationRow`."""

    num_batches: int
    validation_loss: float | None


class StageEnding(_Part):
    """Of ``summary.json``, what is there for each stage."""

    num_layers: int


class Ending(_Part):
    """Of ``summary.json``; see `twobw.training.metrics.Summary`."""

    num_batches: int
    samples: int
    tokens: int
    failure: str | None
    loss_unit: str
    tokens_per_second: float
    stages: tuple[StageEnding, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run has left.

    Attributes:
        config: as it was read from TOML.
        batches: in the order of training.
        validations: likewise.
        ending: None for a run that has not ended, or was killed.
        timeline: of the last batches; None likewise.
        plan: that it was started from, if any.
    """

    config: dict[str, Any]
    batches: list[Batch]
    validations: list[Validation]
    ending: Ending | None
    timeline: Timeline | None
    plan: Plan | None

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each stage; empty for a run that has not ended."""
        return tuple(stage.num_layers for stage in self.ending.stages) if self.ending else ()

    @property
    def plan_problem(self) -> str:
        """How the run's layout is another than its plan's; empty where it is the plan's."""
        parallel = self.config.get("parallel", {})
        names = ("pp", "dp", "schedule", "num_microbatches")
        parts = [
            f"{name} is {parallel.get(name)}, not {getattr(self.plan, name)}"
            for name in names
            if self.plan is not None and parallel.get(name) != getattr(self.plan, name)
        ]
        return f"The run was not laid out as its plan says: {', '.join(parts)}" if parts else ""


def load_run(folder: Path) -> Run:
    """Read a run's folder. A last line of metrics that is cut short is left out.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is not the folder of a run, or a file holds something else.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no {CONFIG}")
    batches, validations = _metrics(folder / METRICS)
    summary, timeline, plan = (folder / name for name in (SUMMARY, TIMELINE, PLAN))
    return Run(
        config=_config(folder / CONFIG),
        batches=batches,
        validations=validations,
        ending=_read(Ending, summary.read_bytes(), str(summary)) if summary.is_file() else None,
        timeline=load_timeline(timeline) if timeline.is_file() else None,
        plan=load_plan(plan) if plan.is_file() else None,
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:  # of TOML and of Unicode, too
        raise ValueError(f"{path} is no config: {error}") from None


def _metrics(path: Path) -> tuple[list[Batch], list[Validation]]:
    batches: list[Batch] = []
    validations: list[Validation] = []
    if not path.is_file():
        return batches, validations
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        where = f"{path}, line {number}"
        if not line.endswith(b"\n"):
            break
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if isinstance(fields, dict) and "validation_loss" in fields:
            validations.append(_read(Validation, line, where))
        else:
            batches.append(_read(Batch, line, where))
    return batches, validations


Part = TypeVar("Part", bound=_Part)


def _read(kind: type[Part], text: bytes, where: str) -> Part:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {name}: {first['msg']}".replace(": : ", ": ")) from None
