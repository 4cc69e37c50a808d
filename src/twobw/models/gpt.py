"""A GPT (Radford et al., 2019) as a list of layers: embedding, blocks, head.

A layer takes and gives one tensor, so the list can be cut anywhere. Each is built by a callable,
on the rank that owns it: nothing else of the model exists there. Only where embedding and head are
tied are these two built on every rank, so that the pipeline can see what they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twobw.models.sizes import GPTConfig

_INIT_STD = 0.02  # GPT-2's

Builder: TypeAlias = Callable[[], nn.Module]


class Embedding(nn.Module):
    """Tokens ``(b, t)``, int64, to vectors ``(b, t, width)``: token plus learned position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.sequence_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=_INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Add token and position.

        Raises:
            ValueError: more tokens than positions.
        """
        length, longest = tokens.shape[1], self.position.num_embeddings
        if length > longest:
            raise ValueError(f"{length} tokens a sample; sequence_length allows {longest}")
        vectors: Tensor = self.token(tokens) + self.position.weight[:length]
        return self.dropout(vectors)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention: ``(b, t, width)`` to the same."""

    is_attention = True  # what ``recompute="attention"`` looks for

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query_key_value = _linear(config.width, 3 * config.width)
        self.out = _linear(config.width, config.width, num_residuals=2 * config.num_layers)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix each token with those before it."""
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (3, b, heads, t, width of a head)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-LayerNorm transformer block: ``(b, t, width)`` to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            _linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            _linear(4 * config.width, config.width, num_residuals=2 * config.num_layers),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add attention's part, then the MLP's."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Vectors ``(b, t, width)`` to logits ``(b, t, vocab_size)``, always in fp32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocab_size, bias=False)
        nn.init.normal_(self.logits.weight, std=_INIT_STD)

    def forward(self, hidden: Tensor) -> Tensor:
        """Score every token of the vocabulary."""
        logits: Tensor = self.logits(self.norm(hidden))
        return logits.float()


def _linear(num_inputs: int, num_outputs: int, num_residuals: int = 1) -> nn.Linear:
    """GPT-2's initialisation: a layer that ends one of the model's ``num_residuals`` branches is
    scaled down, so that their sum keeps the variance of one."""
    linear = nn.Linear(num_inputs, num_outputs)
    nn.init.normal_(linear.weight, std=_INIT_STD / math.sqrt(num_residuals))
    nn.init.zeros_(linear.bias)
    return linear


def _build(index: int, builder: Builder) -> nn.Module:
    return builder()


def gpt_layers(
    config: GPTConfig, build: Callable[[int, Builder], nn.Module] = _build
) -> list[nn.Module | Builder]:
    """The layers, or what builds each: embedding, ``num_layers`` blocks, head.

    A layer draws its weights from torch's global generator, so a seed set before each call gives
    every split of the list the same model.

    Args:
        config: the size.
        build: ``build(index, builder)`` is called here for the embedding and the head where they
            are tied, which then come as modules; it may set the seed before it calls ``builder``.
    """
    last = config.list_length - 1
    ends: list[nn.Module | Builder] = [partial(Embedding, config), partial(Head, config)]
    if config.tied:
        ends = [build(0, partial(Embedding, config)), build(last, partial(Head, config))]
        _tie(*ends)
    return [ends[0], *[partial(Block, config)] * config.num_layers, ends[1]]


def _tie(embedding: object, head: object) -> None:
    """Make the token matrix of one the matrix of the other."""
    assert isinstance(embedding, Embedding)
    assert isinstance(head, Head)
    head.logits.weight = embedding.token.weight


def tied_names(config: GPTConfig) -> dict[str, str]:
    """For each further name of a tied weight, as the whole model has it, its first name."""
    return {f"{config.list_length - 1}.logits.weight": "0.token.weight"} if config.tied else {}


def gpt(config: GPTConfig) -> nn.Sequential:
    """The whole model on one device."""
    layers = gpt_layers(config)
    return nn.Sequential(*(x if isinstance(x, nn.Module) else x() for x in layers))


def gpt_with(config: GPTConfig, weights: Mapping[str, Tensor]) -> nn.Sequential:
    """The whole model with these weights, taken over without a copy; a tied weight may have one
    of its names only, the first.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    with torch.device("meta"):
        model = gpt(config)
    aliases = {
        alias: weights[name] for alias, name in tied_names(config).items() if name in weights
    }
    model.load_state_dict({**weights, **aliases}, assign=True)
    if config.tied:
        _tie(model[0], model[-1])
    return model


def num_parameters(config: GPTConfig) -> int:
    """Parameters of the whole model, tied ones once, counted without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in gpt(config).parameters())


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations of forward and backward for one token of a full sequence: 6N for
    the weights and 12·L·width·T for attention's products (Chowdhery et al., 2022, PaLM, appendix
    B). What is run again to save memory does not count, and N leaves out the embedding tables,
    which are looked up and not multiplied by; a token matrix that is the head's too counts once.
    """
    tables = config.sequence_length + (0 if config.tied else config.vocab_size)
    multiplied = num_parameters(config) - tables * config.width
    return 6 * multiplied + 12 * config.num_layers * config.width * config.sequence_length


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token: logits ``(b, t, vocab_size)``, targets ``(b, t)``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
