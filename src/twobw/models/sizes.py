"""The sizes of the models, by name. No torch: the config is checked before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The size of a transformer.

    Attributes:
        num_layers: transformer blocks. The model is a list of ``num_layers + 2`` layers: the
            embedding, the blocks, the head.
        width: size of a token's vector.
        num_heads: attention heads; must divide ``width``.
        sequence_length: the most tokens of a sample (learned positions).
        vocab_size: tokens known.
        dropout: probability, after the embedding and in both branches of a block.
        tied: whether the embedding's token matrix is the matrix of a head that scores tokens.
    """

    num_layers: int
    width: int
    num_heads: int
    sequence_length: int
    vocab_size: int
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "sequence_length", "vocab_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.width % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, which does not divide width {self.width}; "
                "every head takes the same share of the width"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    @property
    def list_length(self) -> int:
        """Layers in the list that a pipeline splits: embedding, blocks, head."""
        return self.num_layers + 2

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head do share a matrix."""
        return self.tied


@dataclass(frozen=True, slots=True)
class GPTConfig(ModelConfig):
    """The size of a GPT."""


@dataclass(frozen=True, slots=True)
class BertConfig(ModelConfig):
    """The size of a BERT.

    Attributes:
        num_classes: classes of samples that its head tells apart; 0: the head of pre-training,
            which guesses masked tokens.
    """

    num_classes: int = 0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.width // self.num_heads % 2:
            raise ValueError(
                f"num_heads is {self.num_heads}, which gives each head {self.width} / "
                f"{self.num_heads} = {self.width // self.num_heads} of the width; for a BERT that "
                "must be even"
            )
        if self.num_classes < 0 or self.num_classes == 1:
            raise ValueError(
                f"num_classes is {self.num_classes}; it must be at least 2, or 0 to guess tokens"
            )

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head do share a matrix; a head that scores classes has none."""
        return self.tied and self.num_classes == 0


def _paper(num_layers: int, width: int, num_heads: int) -> GPTConfig:
    """A GPT of the 2BW paper (section 4): sequences of 512, GPT-2's vocabulary padded to 51200, the
    matrix of the embedding is the head's."""
    return GPTConfig(num_layers, width, num_heads, 512, vocab_size=51200, tied=True)


def _bytes(num_layers: int, width: int, num_heads: int, sequence_length: int) -> GPTConfig:
    """A GPT on bytes, small enough for a CPU."""
    return GPTConfig(num_layers, width, num_heads, sequence_length, vocab_size=256)


def _bert(num_layers: int, width: int, num_heads: int) -> BertConfig:
    """A BERT of its paper: sequences of 512, 30522 word pieces, the matrix of the embedding is the
    head's."""
    return BertConfig(num_layers, width, num_heads, 512, 30522, dropout=0.1, tied=True)


def _masked_bytes(num_layers: int, width: int, num_heads: int, sequence_length: int) -> BertConfig:
    """A BERT on bytes and the mask, small enough for a CPU."""
    return BertConfig(num_layers, width, num_heads, sequence_length, vocab_size=257, dropout=0.1)


GPT_SIZES: dict[str, GPTConfig] = {
    "gpt-tiny": _bytes(2, 32, 2, sequence_length=32),
    "gpt-demo": _bytes(4, 128, 4, sequence_length=128),
    "gpt-bench": _bytes(8, 256, 4, sequence_length=128),
    "gpt-355m": _paper(24, 1024, 16),
    "gpt-1.3b": _paper(24, 2048, 16),
    "gpt-2.2b": _paper(32, 2304, 32),
    "gpt-3.8b": _paper(32, 3072, 32),
}

BERT_SIZES: dict[str, BertConfig] = {
    "bert-tiny": _masked_bytes(2, 32, 2, sequence_length=32),
    "bert-demo": _masked_bytes(4, 128, 4, sequence_length=128),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
}

MODEL_SIZES: dict[str, GPTConfig | BertConfig] = {**GPT_SIZES, **BERT_SIZES}

_Config = TypeVar("_Config", bound=ModelConfig)


def gpt_config(name: str, **changes: int | float) -> GPTConfig:
    """The named size, with some of its values changed.

    Raises:
        ValueError: an unknown name (the nearest is named), or a size that no GPT can have.
    """
    return _changed(GPT_SIZES, name, changes)


def bert_config(name: str, **changes: int | float) -> BertConfig:
    """The named size, with some of its values changed.

    Raises:
        ValueError: an unknown name (the nearest is named), or a size that no BERT can have.
    """
    return _changed(BERT_SIZES, name, changes)


def _changed(
    sizes: Mapping[str, _Config], name: str, changes: Mapping[str, int | float]
) -> _Config:
    if name not in sizes:
        near = get_close_matches(name, sizes, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model {name!r} is not one of {', '.join(sizes)}{hint}")
    return replace(sizes[name], **changes)  # type: ignore[arg-type]
