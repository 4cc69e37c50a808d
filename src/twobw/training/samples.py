"""What a run is trained on, as its model and its data settings say."""

from __future__ import annotations

from twobw.config import Config
from twobw.models.sizes import BertConfig
from twobw.training.classification import PackageSnippets
from twobw.training.data import DataError, Samples, TextData
from twobw.training.disorder import DisorderedText
from twobw.training.masking import MaskedText


def check_samples(config: Config) -> str:
    """Make sure that there is enough to train and to validate on, before any rank starts. Reads
    all of it, as each rank will, and returns its description.

    Raises:
        DataError: there is not.
    """
    samples = make_samples(config)
    validation_batch(config, samples)
    return samples.description


def validation_batch(config: Config, data: Samples) -> tuple[int, int]:
    """How many samples a validation batch has, over all replicas, and how many microbatches.

    Raises:
        DataError: there are too few samples for the replicas.
    """
    training, parallel = config.training, config.parallel
    size = min(training.evaluation_size, data.num_validation_windows)
    wanted = training.evaluation_microbatches or parallel.num_microbatches
    if training.evaluation_batches and size < parallel.dp:
        raise DataError(
            f"the validation text has {size} samples, fewer than parallel.dp = {parallel.dp}; give "
            "more text or a larger data.validation_fraction, or set training.evaluation_batches = 0"
        )
    return size, min(wanted, size // parallel.dp)


def make_samples(config: Config) -> Samples:
    """The text for a GPT, the same with bytes masked for a BERT, and for a BERT that tells classes
    apart snippets of it with their packages, or the text in and out of order.

    Raises:
        DataError: the text will not do.
    """
    size, seed = config.model.size(), config.training.seed
    text = TextData(
        config.data.paths,
        sequence_length=size.sequence_length,
        validation_fraction=config.data.validation_fraction,
        seed=seed,
    )
    if not isinstance(size, BertConfig):
        return text
    if not size.num_classes:
        return MaskedText(text, seed)
    if config.data.classes == "order":
        return DisorderedText(text, seed)
    return PackageSnippets(
        text,
        num_classes=size.num_classes,
        samples_per_class=config.data.samples_per_class,
        seed=seed,
    )
