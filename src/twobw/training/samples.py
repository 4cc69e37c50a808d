"""What a run is trained on, as its model and its data settings say."""

from __future__ import annotations

from twobw.config import Config
from twobw.models.sizes import BertConfig
from twobw.training.classification import PackageSnippets
from twobw.training.data import Samples, TextData
from twobw.training.masking import MaskedText


def make_samples(config: Config) -> Samples:
    """The text for a GPT, the same with bytes masked for a BERT, snippets of it with classes for a
    BERT that tells classes apart.

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
    return PackageSnippets(
        text,
        num_classes=size.num_classes,
        samples_per_class=config.data.samples_per_class,
        seed=seed,
    )
