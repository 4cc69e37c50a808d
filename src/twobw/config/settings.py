"""The settings of a run: one typed, frozen tree. `twobw.config.loading` reads and checks it.

No torch here: a config is checked before any process starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twobw.core.generators import SCHEDULES
from twobw.models.sizes import GPT_SIZES, GPTConfig


def nearest(name: str, allowed: Iterable[str]) -> list[str]:
    """The name in ``allowed`` nearest to ``name``, in a list; an empty list if none is near."""
    by_lower_case = {other.lower(): other for other in allowed}
    near = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.5)
    return [by_lower_case[other] for other in near]


def _choice(*allowed: str) -> AfterValidator:
    """A string out of ``allowed``; a wrong one is answered with the nearest."""

    def check(value: str) -> str:
        if value not in allowed:
            near = nearest(value, allowed)
            hint = f"; did you mean {near[0]}?" if near else ""
            message = f"must be one of {', '.join(allowed)}{hint}"
            raise PydanticCustomError("choice", "{message}", {"message": message})
        return value

    return AfterValidator(check)


def _one_path_as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _check_folder_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("must be a folder name of letters, digits, '.', '_' and '-'")
    return value


Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A frozen table of settings: unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSettings(Section):
    """``[model]``: a size by name; each of its values may be set on its own."""

    name: Annotated[str, _choice(*GPT_SIZES)]
    num_layers: Size
    width: Size
    num_heads: Size
    sequence_length: Size
    vocab_size: Annotated[int, Field(ge=256)]  # a byte is a token
    dropout: Decay

    @model_validator(mode="before")
    @classmethod
    def _fill_from_named_size(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = str(data.get("name"))
        any_size = next(iter(GPT_SIZES.values()))  # for a wrong name, which is reported on its own
        return asdict(GPT_SIZES.get(name, any_size)) | data

    @model_validator(mode="after")
    def _is_a_gpt(self) -> ModelSettings:
        self.gpt()
        return self

    def gpt(self) -> GPTConfig:
        """The size as the model takes it."""
        return GPTConfig(**self.model_dump(exclude={"name"}))


class DataSettings(Section):
    """``[data]``: where the text comes from.

    ``paths`` are files and folders, relative to the current folder; none means the source of
    Python's standard library. ``validation_fraction`` of the bytes is held back from training.
    """

    paths: Annotated[tuple[Text, ...], Field(strict=False), BeforeValidator(_one_path_as_list)] = ()
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05


class ParallelSettings(Section):
    """``[parallel]``: ``pp`` stages, ``dp`` replicas of each, and the order of their work.

    ``split`` gives the layers of each stage (embedding and head count as one each); empty
    balances them by parameters. ``extra_in_flight`` is 2BW's: more microbatches in flight, to
    hide slow links.
    """

    pp: Size = 2
    dp: Size = 1
    schedule: Annotated[str, _choice(*SCHEDULES)] = "2bw"
    num_microbatches: Size = 4
    extra_in_flight: Count = 0
    split: Annotated[tuple[Size, ...], Field(strict=False)] = ()


class OptimizerSettings(Section):
    """``[optimizer]``: ``betas`` are AdamW's, ``momentum`` is SGD's.

    The rate rises linearly over ``warmup_batches`` to ``lr``, then decays to
    ``final_lr_fraction * lr`` at the last batch (``constant``: stays).
    """

    name: Annotated[str, _choice("adamw", "sgd")] = "adamw"
    lr: Annotated[float, Field(gt=0.0)]
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    momentum: Decay = 0.9
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    warmup_batches: Count = 0
    decay: Annotated[str, _choice("constant", "cosine", "linear")] = "cosine"
    final_lr_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1


class TrainingSettings(Section):
    """``[training]``: ``log_every`` is in batches, ``evaluation_batches`` the validation batches
    taken at the start and at the end (0: none), ``timeout_s`` the longest wait for another rank,
    ``num_threads`` torch's threads a rank."""

    num_batches: Size
    global_batch_size: Size
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    log_every: Size = 10
    evaluation_batches: Count = 8
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    num_threads: Size = 1


class RunSettings(Section):
    """``[run]``: results go to ``folder/name``; the name is the config file's unless given."""

    name: Annotated[str, AfterValidator(_check_folder_name)]
    folder: Text = "runs"


class Config(Section):
    """The whole tree."""

    model: ModelSettings
    data: DataSettings
    parallel: ParallelSettings
    optimizer: OptimizerSettings
    training: TrainingSettings
    run: RunSettings

    @property
    def run_folder(self) -> Path:
        """Where the results go."""
        return Path(self.run.folder) / self.run.name
