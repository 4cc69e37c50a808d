"""The settings of a run: one typed, frozen tree. `twobw.config.loading` reads and checks it.

No torch here: a config is checked before any process starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twobw.core.generators import SCHEDULES
from twobw.core.rank_grid import Placement, RankGrid
from twobw.models.sizes import MODEL_SIZES, BertConfig, GPTConfig


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


_BYTES_AND_MASK = 257


def _check_lag(value: object) -> int | str:
    is_lag = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_lag or value == "measured":
        return value  # type: ignore[return-value]
    raise ValueError('must be a whole number of at least 0, or "measured"')


Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A frozen table of settings: unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSettings(Section):
    """``[model]``: a size by name, of a GPT or a BERT; each of its values may be set on its own.

    ``tied``: embedding and head share the token matrix. ``num_classes``: a BERT that tells so many
    classes of samples apart; 0: it guesses masked bytes. ``init_from``: a run's file of weights to
    start from, of a model that may have another head.
    """

    name: Annotated[str, _choice(*MODEL_SIZES)]
    num_layers: Size
    width: Size
    num_heads: Size
    sequence_length: Size
    vocab_size: Annotated[int, Field(ge=256)]  # a byte is a token
    dropout: Decay
    tied: bool
    num_classes: Count = 0
    init_from: str = ""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_named_size(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = str(data.get("name"))
        any_size = next(iter(MODEL_SIZES.values()))  # for a wrong name, reported on its own
        return asdict(MODEL_SIZES.get(name, any_size)) | data

    @model_validator(mode="after")
    def _can_be(self) -> ModelSettings:
        if not isinstance(self.size(), BertConfig) and self.num_classes:
            raise ValueError(
                f"num_classes is {self.num_classes}, but {self.name} is not a BERT; leave it out"
            )
        if isinstance(self.size(), BertConfig) and self.vocab_size < _BYTES_AND_MASK:
            raise ValueError(
                f"vocab_size is {self.vocab_size}; a BERT's must be at least {_BYTES_AND_MASK}: "
                "the bytes and the mask"
            )
        return self

    def size(self) -> GPTConfig | BertConfig:
        """The size as the model takes it."""
        values = self.model_dump(include={field.name for field in fields(GPTConfig)})
        if isinstance(MODEL_SIZES[self.name], BertConfig):
            return BertConfig(**values, num_classes=self.num_classes)
        return GPTConfig(**values)


class DataSettings(Section):
    """``[data]``: where the text comes from.

    ``paths`` are files and folders, relative to the current folder; none means the source of
    Python's standard library. ``validation_fraction`` of the bytes is held back from training.

    ``classes`` is for a model with ``num_classes``: ``package`` is the folder directly below a path
    that a snippet is from, ``order`` whether a snippet is as it was written, has neighbouring bytes
    exchanged, or words (3 classes). Of each package ``samples_per_class`` labelled snippets are
    trained on (0: all, as many of each).
    """

    paths: Annotated[tuple[Text, ...], Field(strict=False), BeforeValidator(_one_path_as_list)] = ()
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    classes: Annotated[str, _choice("package", "order")] = "package"
    samples_per_class: Count = 0


class ParallelSettings(Section):
    """``[parallel]``: ``pp`` stages, ``dp`` replicas of each, and the order of their work.

    ``placement`` says what neighbouring ranks are, which launchers put on one machine: the
    ``replicas`` of a stage, or the stages of a pipeline (``pipelines``).

    ``split`` gives the layers of each stage (embedding and head count as one each); empty
    balances them by parameters. ``extra_in_flight`` is 2BW's: more microbatches in flight, to
    hide slow links.

    ``update_lag``, in microbatches, is 2bw-fresh's: the time that what ranks reduce together has
    to arrive, for as many more stale microbatches, or ``"measured"``. ``lookahead`` takes
    stale gradients at weights extrapolated by so much of their last change (0: not), and
    ``flush_batches`` runs the first so many batches by 1f1b.

    ``overlap_reduce`` hides what ranks must reduce together behind the next batch, for a second
    gradient buffer. ``shard_optimizer`` spreads optimizer state over the replicas (ZeRO stage 1);
    with one replica it changes nothing. ``check_replicas_every`` so many batches, and at the end,
    a run makes sure that replicas have equal weights (0: never).
    """

    pp: Size = 2
    dp: Size = 1
    placement: Annotated[str, _choice(*get_args(Placement))] = "replicas"
    schedule: Annotated[str, _choice(*SCHEDULES)] = "2bw-fresh"
    num_microbatches: Size = 4
    extra_in_flight: Count = 0
    update_lag: Annotated[int | str, PlainValidator(_check_lag)] = "measured"
    lookahead: Annotated[float, Field(ge=0.0)] = 0.0
    flush_batches: Count = 0
    split: Annotated[tuple[Size, ...], Field(strict=False)] = ()
    overlap_reduce: bool = True
    shard_optimizer: bool = False
    check_replicas_every: Count = 0

    @property
    def grid(self) -> RankGrid:
        """Which rank has which stage and replica."""
        return RankGrid(self.pp, self.dp, self.placement)  # type: ignore[arg-type]


class OptimizerSettings(Section):
    """``[optimizer]``: ``betas`` are AdamW's, ``momentum`` SGD's and Muon's.

    ``muon`` is torch.optim.Muon for the matrices inside the blocks, with the rate ``matrix_lr``
    and its own ``nesterov``, ``ns_steps`` and ``adjust_lr_fn``; all else (embeddings, head,
    norms, biases) has AdamW. ``weight_decay`` is for what has two dimensions or more, embeddings
    and head included; norms and biases have none. Each optimizer multiplies it by its own rate.

    Rates rise linearly over ``warmup_batches``, then fall by ``decay`` to ``final_lr_fraction`` of
    themselves at the last batch: ``linear`` and ``cosine`` from there on, ``wsd`` (warm-up,
    stable, decay) linearly over the last ``decay_fraction`` of the batches; ``constant`` stays.
    """

    name: Annotated[str, _choice("adamw", "sgd", "muon")] = "adamw"
    lr: Annotated[float, Field(gt=0.0)]
    matrix_lr: Annotated[float, Field(gt=0.0)] = 0.02
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    momentum: Decay = 0.9
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    adjust_lr_fn: Annotated[str, _choice("original", "match_rms_adamw")] = "original"
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    warmup_batches: Count = 0
    decay: Annotated[str, _choice("constant", "linear", "cosine", "wsd")] = "cosine"
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    final_lr_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1

    def decay_batches(self, num_batches: int) -> int:
        """How many of a run's batches ``wsd`` lets the rate fall over."""
        return max(round(self.decay_fraction * num_batches), 1)


class TrainingSettings(Section):
    """``[training]``: ``device``: ``auto`` is a GPU a rank where there are any. ``log_every`` is in
    batches, ``timeout_s`` the longest wait for another
    rank, ``num_threads`` torch's threads a rank.

    ``precision``: ``bf16`` and ``fp16`` compute in 16 bits and keep fp32 weights and gradients
    beside (fp16 with dynamic loss scaling). ``recompute``: what is run again for the backward
    instead of being kept: each ``layer``, the whole ``stage``, or ``attention`` alone.
    ``max_grad_norm`` clips the global norm of the gradient (0: neither taken nor clipped).
    ``on_divergence``: when the loss is not finite, ``stop``; ``skip`` leaves out, on every rank,
    updates whose gradient is not finite, for which updates wait for other ranks as with clipping;
    or ``continue``.

    The model is evaluated on ``evaluation_batches`` validation batches (0: never) at the start
    and the end, and every ``evaluate_every`` batches (0: only then). A validation batch has
    ``evaluation_batch_size`` samples (0: ``global_batch_size``) in ``evaluation_microbatches``
    (0: as many as in training, or as fit).
    """

    num_batches: Size
    global_batch_size: Size
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Annotated[str, _choice("fp32", "bf16", "fp16")] = "fp32"
    recompute: Annotated[str, _choice("none", "layer", "stage", "attention")] = "none"
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 0.0
    on_divergence: Annotated[str, _choice("stop", "skip", "continue")] = "stop"
    log_every: Size = 10
    evaluate_every: Count = 0
    evaluation_batches: Count = 8
    evaluation_batch_size: Count = 0
    evaluation_microbatches: Count = 0
    device: Annotated[str, _choice("auto", "cpu", "cuda")] = "auto"
    timeout_s: Annotated[float, Field(gt=0.0, le=1e6)] = 600.0
    num_threads: Annotated[int, Field(ge=1, le=1024)] = 1

    @property
    def evaluation_size(self) -> int:
        """Samples of a validation batch."""
        return self.evaluation_batch_size or self.global_batch_size


class CheckpointSettings(Section):
    """``[checkpoint]``: written behind training ``every`` so many batches and at the end (0: only
    when a run is stopped early), into the folder of the run.

    Of them stay the ``keep_last`` newest (0: all), those after a multiple of ``keep_every``
    batches (0: none for that), and with ``keep_best`` the one with the lowest validation loss.
    """

    every: Count = 0
    keep_last: Count = 2
    keep_every: Count = 0
    keep_best: bool = False


class RunSettings(Section):
    """``[run]``: results go to ``folder/name``; the name is the config file's unless given.
    ``tensorboard`` writes metrics for TensorBoard, too."""

    name: Annotated[str, AfterValidator(_check_folder_name)]
    folder: Text = "runs"
    tensorboard: bool = False


class Config(Section):
    """The whole tree."""

    model: ModelSettings
    data: DataSettings
    parallel: ParallelSettings
    optimizer: OptimizerSettings
    training: TrainingSettings
    checkpoint: CheckpointSettings
    run: RunSettings

    @property
    def run_folder(self) -> Path:
        """Where the results go."""
        return Path(self.run.folder) / self.run.name

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.parallel.pp * self.parallel.dp
