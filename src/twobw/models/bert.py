"""A BERT (Devlin et al., 2019) as a list of layers: embedding, blocks, head.

The head is that of pre-training, which guesses masked tokens, or one that tells classes of samples
apart. Three things differ from the paper. LayerNorm stands before each part of a block and once
after the last block, without which deep BERTs do not train (Shoeybi et al., 2019, Megatron-LM,
section 5.3). There is no next-sentence task (Liu et al., 2019, RoBERTa), thus no segments and no
``[CLS]``: a class is told from the mean over the tokens. Beside the learned positions, attention
knows how far apart two tokens are (Su et al., 2021, RoFormer): it then finds a token's neighbours
within some hundred batches, and not within some thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from twobw.models.sizes import BertConfig
from twobw.models.transformer import (
    Block,
    Builder,
    TokensAndPositions,
    build_now,
    layer_list,
    linear,
)

NOT_MASKED = -100  # the target of a token that is not to be guessed


class Embedding(TokensAndPositions):
    """Tokens ``(b, t)``, int64, to vectors ``(b, t, width)``: token plus learned position,
    normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Add token and position, normalise.

        Raises:
            ValueError: more tokens than positions.
        """
        return self.dropout(self.norm(self.add(tokens)))  # type: ignore[no-any-return]


class MaskedTokenHead(nn.Module):
    """Vectors ``(b, t, width)`` to logits ``(b, t, vocab_size)``, always in fp32."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.dense = linear(config.width, config.width)
        self.dense_norm = nn.LayerNorm(config.width)
        self.logits = linear(config.width, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Score every token of the vocabulary in every place."""
        hidden = F.gelu(self.dense(self.norm(hidden)), approximate="tanh")
        logits: Tensor = self.logits(self.dense_norm(hidden))
        return logits.float()


class ClassHead(nn.Module):
    """Vectors ``(b, t, width)`` to logits ``(b, num_classes)``, always in fp32."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.classes = linear(config.width, config.num_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        """Score every class."""
        logits: Tensor = self.classes(self.dropout(self.norm(hidden).mean(1)))
        return logits.float()


def bert_layers(
    config: BertConfig, build: Callable[[int, Builder], nn.Module] = build_now
) -> list[nn.Module | Builder]:
    """The layers, or what builds each: embedding, ``num_layers`` blocks, head.

    Args:
        config: the size, and which head.
        build: as for `twobw.models.transformer.layer_list`.
    """
    return layer_list(
        config,
        partial(Embedding, config),
        partial(Block, config, is_causal=False, is_rotary=True),
        partial(ClassHead if config.num_classes else MaskedTokenHead, config),
        build,
    )


def masked_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the masked tokens, in nats: its sum, and how many there are.

    Args:
        logits: ``(b, t, vocab_size)``.
        targets: ``(b, t)``, int64: what was masked, and elsewhere `NOT_MASKED`.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_MASKED, reduction="sum"
    )
    return total, (targets != NOT_MASKED).sum()


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a sample: logits ``(b, num_classes)``, targets ``(b,)``."""
    return F.cross_entropy(logits, targets)
