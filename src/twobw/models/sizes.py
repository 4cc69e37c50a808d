"""The sizes of the models, by name. No torch: the config is checked before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The size of a GPT.

    Attributes:
        num_layers: transformer blocks. The model is a list of ``num_layers + 2`` layers: the
            embedding, the blocks, the head.
        width: size of a token's vector.
        num_heads: attention heads; must divide ``width``.
        sequence_length: the most tokens of a sample (learned positions).
        vocab_size: tokens known.
        dropout: probability, after the embedding and in both branches of a block.
        tied: whether the embedding's token matrix is the head's matrix too.
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


def _paper(num_layers: int, width: int, num_heads: int) -> GPTConfig:
    """A GPT of the 2BW paper (section 4): sequences of 512, GPT-2's vocabulary padded to 51200."""
    return GPTConfig(num_layers, width, num_heads, sequence_length=512, vocab_size=51200)


def _bytes(num_layers: int, width: int, num_heads: int, sequence_length: int) -> GPTConfig:
    """A GPT on bytes, small enough for a CPU."""
    return GPTConfig(num_layers, width, num_heads, sequence_length, vocab_size=256)


GPT_SIZES: dict[str, GPTConfig] = {
    "gpt-tiny": _bytes(2, 32, 2, sequence_length=32),
    "gpt-demo": _bytes(4, 128, 4, sequence_length=128),
    "gpt-bench": _bytes(8, 256, 4, sequence_length=128),
    "gpt-355m": _paper(24, 1024, 16),
    "gpt-1.3b": _paper(24, 2048, 16),
    "gpt-2.2b": _paper(32, 2304, 32),
    "gpt-3.8b": _paper(32, 3072, 32),
}


def gpt_config(name: str, **changes: int | float) -> GPTConfig:
    """The named size, with some of its values changed.

    Raises:
        ValueError: an unknown name (the nearest is named), or a size that no GPT can have.
    """
    if name not in GPT_SIZES:
        near = get_close_matches(name, GPT_SIZES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model {name!r} is not one of {', '.join(GPT_SIZES)}{hint}")
    return replace(GPT_SIZES[name], **changes)  # type: ignore[arg-type]
