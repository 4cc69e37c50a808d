"""Problems between settings that are each right on their own."""

from __future__ import annotations

from collections.abc import Iterator

from twobw.config.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    Section,
    TrainingSettings,
)
from twobw.config.toml_text import toml_text
from twobw.core.generators import stage_rule
from twobw.core.staleness import check_lookahead, check_recompute

_NUM_ORDERS = 3  # of `twobw.training.disorder`, which imports torch


def disagreements(
    model: ModelSettings | None = None,
    data: DataSettings | None = None,
    parallel: ParallelSettings | None = None,
    optimizer: OptimizerSettings | None = None,
    training: TrainingSettings | None = None,
    checkpoint: CheckpointSettings | None = None,
    **_: Section,
) -> Iterator[str]:
    """One line a problem; a section in error is left out."""
    if parallel:
        yield from _schedule_problems(parallel)
    if data and model:
        yield from _class_problems(data, model)
    if parallel and model:
        yield from _split_problems(parallel, model.size().list_length)
    if parallel and training:
        yield from _batch_problems(parallel, training)
        yield from _precision_problems(parallel, training)
        yield from _divergence_problems(parallel, training)
        yield from _recompute_problems(parallel, training)
    if training:
        yield from _evaluation_problems(training)
    if checkpoint and training and checkpoint.keep_best and not training.evaluate_every:
        yield "checkpoint.keep_best = true: needs training.evaluate_every of at least 1"
    if optimizer and training:
        yield from _rate_problems(optimizer, training.num_batches)


def _class_problems(data: DataSettings, model: ModelSettings) -> Iterator[str]:
    if data.samples_per_class and not model.num_classes:
        yield (
            f"data.samples_per_class = {data.samples_per_class}: needs model.num_classes, which "
            "only a BERT may have"
        )
    if data.classes != "order":
        return
    if model.num_classes != _NUM_ORDERS:
        yield (
            f'data.classes = "order": needs model.num_classes = {_NUM_ORDERS}, not '
            f"{model.num_classes}, and a BERT"
        )
    if data.samples_per_class:
        yield (
            f"data.samples_per_class = {data.samples_per_class}: does not go with "
            'data.classes = "order", whose labels are made as they are needed; leave it out'
        )


def _schedule_problems(parallel: ParallelSettings) -> Iterator[str]:
    sizes = parallel.pp, parallel.num_microbatches
    given = {"extra_in_flight": parallel.extra_in_flight} if parallel.extra_in_flight else {}
    if isinstance(parallel.update_lag, int):
        given["update_lag"] = parallel.update_lag
    for name, value in given.items():
        try:
            stage_rule(parallel.schedule, 0, *sizes, **{name: value})
        except ValueError as error:
            yield f"parallel.{name} = {value}: {error}"
            return
    if parallel.lookahead:
        try:
            check_lookahead(parallel.schedule, *sizes, **given)
        except ValueError as error:
            yield f"parallel.lookahead = {parallel.lookahead}: {error}"


def _split_problems(parallel: ParallelSettings, num_layers: int) -> Iterator[str]:
    made_of = f"the model's layers, {num_layers} (embedding, {num_layers - 2} blocks, head)"
    if parallel.pp > num_layers:
        yield f"parallel.pp = {parallel.pp}: must be at most the number of {made_of}"
    if not parallel.split:
        return
    split = f"parallel.split = {toml_text(parallel.split)}"
    if len(parallel.split) != parallel.pp:
        yield f"{split}: must have parallel.pp = {parallel.pp} entries"
    if sum(parallel.split) != num_layers:
        yield f"{split}: adds up to {sum(parallel.split)}; it must add up to {made_of}"


def _batch_problems(parallel: ParallelSettings, training: TrainingSettings) -> Iterator[str]:
    """Each replica cuts its part of a batch into all the microbatches: a sample for each."""
    count, dp = parallel.num_microbatches, parallel.dp
    if training.global_batch_size < count * dp:
        yield (
            f"training.global_batch_size = {training.global_batch_size}: must be at least "
            f"{_product('parallel.num_microbatches', count, dp)}, a sample for each"
        )
    size, count = training.evaluation_batch_size, training.evaluation_microbatches
    if (size or count) and training.evaluation_size < max(count, 1) * dp:
        least = _product("training.evaluation_microbatches", count, dp)
        yield (
            f"training.evaluation_batch_size = {size}: a validation batch has "
            f"{training.evaluation_size} samples; it must have at least {least}, a sample for each"
        )


def _product(name: str, num_microbatches: int, dp: int) -> str:
    """How many samples a batch must have at least."""
    if num_microbatches == 0:
        return f"parallel.dp = {dp}"
    if dp == 1:
        return f"{name} = {num_microbatches}"
    return f"{name} * parallel.dp = {num_microbatches} * {dp} = {num_microbatches * dp}"


def _precision_problems(parallel: ParallelSettings, training: TrainingSettings) -> Iterator[str]:
    if training.precision == "fp16" and parallel.schedule == "weight-stashing":
        yield (
            'training.precision = "fp16": does not go with parallel.schedule = "weight-stashing", '
            'whose updates cannot wait for the overflows of other stages; use "bf16"'
        )


def _divergence_problems(parallel: ParallelSettings, training: TrainingSettings) -> Iterator[str]:
    if training.on_divergence == "skip" and parallel.schedule == "weight-stashing":
        yield (
            'training.on_divergence = "skip": does not go with parallel.schedule = '
            '"weight-stashing", whose updates cannot wait for the gradients of other stages; use '
            '"stop"'
        )


def _recompute_problems(parallel: ParallelSettings, training: TrainingSettings) -> Iterator[str]:
    if training.recompute != "none":
        try:
            check_recompute(parallel.schedule, parallel.pp, parallel.num_microbatches)
        except ValueError as error:
            yield f"training.recompute = {toml_text(training.recompute)}: {error}"


def _evaluation_problems(training: TrainingSettings) -> Iterator[str]:
    if training.evaluate_every and not training.evaluation_batches:
        yield (
            f"training.evaluate_every = {training.evaluate_every}: needs "
            "training.evaluation_batches of at least 1"
        )


def _rate_problems(optimizer: OptimizerSettings, num_batches: int) -> Iterator[str]:
    warmup = f"optimizer.warmup_batches = {optimizer.warmup_batches}"
    if optimizer.warmup_batches > num_batches:
        yield f"{warmup}: must be at most training.num_batches = {num_batches}"
        return
    fall = optimizer.decay_batches(num_batches)
    if optimizer.decay == "wsd" and optimizer.warmup_batches + fall > num_batches:
        yield (
            f"{warmup}: too long for training.num_batches = {num_batches}, since the rate falls "
            f"over the last {fall} (optimizer.decay_fraction = {optimizer.decay_fraction})"
        )
