"""A GPT (Radford et al., 2019) as a list of layers: embedding, blocks, head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from twobw.models.sizes import GPTConfig
from twobw.models.transformer import (
    INIT_STD,
    Block,
    Builder,
    TokensAndPositions,
    build_now,
    layer_list,
)


class Embedding(TokensAndPositions):
    """Tokens ``(b, t)``, int64, to vectors ``(b, t, width)``: token plus learned position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Add token and position.

        Raises:
            ValueError: more tokens than positions.
        """
        return self.dropout(self.add(tokens))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Vectors ``(b, t, width)`` to logits ``(b, t, vocab_size)``, always in fp32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocab_size, bias=False)
        nn.init.normal_(self.logits.weight, std=INIT_STD)

    def forward(self, hidden: Tensor) -> Tensor:
        """Score every token of the vocabulary."""
        logits: Tensor = self.logits(self.norm(hidden))
        return logits.float()


def gpt_layers(
    config: GPTConfig, build: Callable[[int, Builder], nn.Module] = build_now
) -> list[nn.Module | Builder]:
    """The layers, or what builds each: embedding, ``num_layers`` blocks, head.

    Args:
        config: the size.
        build: as for `twobw.models.transformer.layer_list`.
    """
    return layer_list(
        config,
        partial(Embedding, config),
        partial(Block, config, is_causal=True),
        partial(Head, config),
        build,
    )


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token: logits ``(b, t, vocab_size)``, targets ``(b, t)``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
