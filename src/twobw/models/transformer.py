"""What the transformers here share: the block, its initialisation, and the list they come as.

A layer takes and gives one tensor, so the list can be cut anywhere. Each is built by a callable,
on the rank that owns it: nothing else of the model exists there. Only where embedding and head are
tied are these two built on every rank, so that the pipeline can see what they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twobw.models.sizes import ModelConfig

INIT_STD = 0.02  # GPT-2's and BERT's

Builder: TypeAlias = Callable[[], nn.Module]


class Attention(nn.Module):
    """Self-attention: ``(b, t, width)`` to the same.

    Args:
        config: the size.
        is_causal: whether a token sees only itself and those before it.
        is_rotary: whether it knows how far apart two tokens are (see `rotated`).
    """

    is_attention = True  # what ``recompute="attention"`` looks for

    def __init__(self, config: ModelConfig, *, is_causal: bool, is_rotary: bool = False) -> None:
        super().__init__()
        self.is_rotary = is_rotary
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.is_causal = is_causal
        self.query_key_value = linear(config.width, 3 * config.width)
        self.out = linear(config.width, config.width, num_residuals=2 * config.num_layers)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix each token with those that it sees."""
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (3, b, heads, t, width of a head)
        if self.is_rotary:
            query, key = rotated(query), rotated(key)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-LayerNorm transformer block: ``(b, t, width)`` to the same.

    Args:
        config: the size.
        is_causal: whether a token sees only itself and those before it.
        is_rotary: whether attention knows how far apart two tokens are (see `rotated`).
    """

    def __init__(self, config: ModelConfig, *, is_causal: bool, is_rotary: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, is_causal=is_causal, is_rotary=is_rotary)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            linear(4 * config.width, config.width, num_residuals=2 * config.num_layers),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add attention's part, then the MLP's."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))  # type: ignore[no-any-return]


def rotated(vectors: Tensor) -> Tensor:
    """Turn each vector by angles that grow with its place: the product of two turned vectors then
    depends on the two and on the distance of their places (Su et al., 2021, RoFormer).

    Args:
        vectors: ``(..., t, size)``, size even; its component i and i + size / 2 are turned as a
            pair, by place times 10000 to the power of -2i / size.
    """
    length, size = vectors.shape[-2:]
    pairs = torch.arange(size // 2, device=vectors.device)
    places = torch.arange(length, device=vectors.device)
    angles = places[:, None] * 10000.0 ** (-2 * pairs / size)
    cos, sin = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class TokensAndPositions(nn.Module):
    """Tokens ``(b, t)``, int64, to vectors ``(b, t, width)``: token plus learned position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.sequence_length, config.width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=INIT_STD)

    def add(self, tokens: Tensor) -> Tensor:
        """Add token and position.

        Raises:
            ValueError: more tokens than positions.
        """
        length, longest = tokens.shape[1], self.position.num_embeddings
        if length > longest:
            raise ValueError(f"{length} tokens a sample; sequence_length allows {longest}")
        vectors: Tensor = self.token(tokens) + self.position.weight[:length]
        return vectors


def linear(num_inputs: int, num_outputs: int, num_residuals: int = 1) -> nn.Linear:
    """GPT-2's initialisation: a layer that ends one of the model's ``num_residuals`` branches is
    scaled down, so that their sum keeps the variance of one."""
    made = nn.Linear(num_inputs, num_outputs)
    nn.init.normal_(made.weight, std=INIT_STD / math.sqrt(num_residuals))
    nn.init.zeros_(made.bias)
    return made


def build_now(index: int, builder: Builder) -> nn.Module:
    """Build a layer with the random generator as it is."""
    return builder()


def layer_list(
    config: ModelConfig,
    embedding: Builder,
    block: Builder,
    head: Builder,
    build: Callable[[int, Builder], nn.Module],
) -> list[nn.Module | Builder]:
    """Embedding, ``num_layers`` blocks, head: what builds each, or the layer itself where embedding
    and head are tied.

    A layer draws its weights from torch's global generator, so a seed set before each call gives
    every split of the list the same model.

    Args:
        config: the size.
        embedding: builds the first layer; if tied it has ``token``.
        block: builds each of those between.
        head: builds the last layer; if tied it has ``logits``.
        build: ``build(index, builder)`` is called here for the embedding and the head where they
            are tied, which then come as modules; it may set the seed before it calls ``builder``.
    """
    ends: list[nn.Module | Builder] = [embedding, head]
    if config.is_tied:
        ends = [build(0, embedding), build(config.list_length - 1, head)]
        tie(*ends)
    return [ends[0], *[block] * config.num_layers, ends[1]]


def tie(embedding: object, head: object) -> None:
    """Make the token matrix of one the matrix of the other."""
    assert isinstance(embedding, TokensAndPositions)
    assert isinstance(head, nn.Module)
    assert isinstance(head.logits, nn.Linear)
    head.logits.weight = embedding.token.weight
