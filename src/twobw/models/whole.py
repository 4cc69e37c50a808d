"""The whole model of a size, whichever family it is of: its layers, loss, weights and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from twobw.models.bert import bert_layers, class_loss, masked_loss
from twobw.models.gpt import gpt_layers, loss_fn
from twobw.models.sizes import BertConfig, GPTConfig
from twobw.models.transformer import Builder, build_now, tie

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


def model_layers(
    config: GPTConfig | BertConfig, build: Callable[[int, Builder], nn.Module] = build_now
) -> list[nn.Module | Builder]:
    """The layers, or what builds each; ``build`` as for `twobw.models.transformer.layer_list`."""
    if isinstance(config, BertConfig):
        return bert_layers(config, build)
    return gpt_layers(config, build)


def model_loss(config: GPTConfig | BertConfig) -> Loss:
    """What the model is trained to lower."""
    if isinstance(config, BertConfig):
        return class_loss if config.num_classes else masked_loss
    return loss_fn


def tied_names(config: GPTConfig | BertConfig) -> dict[str, str]:
    """For each further name of a tied weight, as the whole model has it, its first name."""
    head = config.list_length - 1
    return {f"{head}.logits.weight": "0.token.weight"} if config.is_tied else {}


def whole_model(config: GPTConfig | BertConfig) -> nn.Sequential:
    """The whole model on one device."""
    layers = model_layers(config)
    return nn.Sequential(*(x if isinstance(x, nn.Module) else x() for x in layers))


def model_with(config: GPTConfig | BertConfig, weights: Mapping[str, Tensor]) -> nn.Sequential:
    """The whole model with these weights, taken over without a copy; a tied weight may have one
    of its names only, the first.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    model = shapes_of(config)
    aliases = {
        alias: weights[name] for alias, name in tied_names(config).items() if name in weights
    }
    model.load_state_dict({**weights, **aliases}, assign=True)
    if config.is_tied:
        tie(model[0], model[-1])
    return model


def shapes_of(config: GPTConfig | BertConfig) -> nn.Sequential:
    """The whole model on the meta device: names and shapes, no memory for weights."""
    with torch.device("meta"):
        return whole_model(config)


def num_parameters(config: GPTConfig | BertConfig) -> int:
    """Parameters of the whole model, tied ones once, counted without memory for them."""
    return sum(parameter.numel() for parameter in shapes_of(config).parameters())


def flops_per_token(config: GPTConfig | BertConfig) -> int:
    """Floating-point operations of forward and backward for one token of a full sequence: 6N for
    the weights and 12·L·width·T for attention's products (Chowdhery et al., 2022, PaLM, appendix
    B). What is run again to save memory does not count, and N leaves out the embedding tables,
    which are looked up and not multiplied by; a token matrix that is the head's too counts once.
    A head that tells classes apart works once a sample and is left out, too.
    """
    tables = config.sequence_length + (0 if config.is_tied else config.vocab_size)
    multiplied = num_parameters(config) - tables * config.width
    if isinstance(config, BertConfig) and config.num_classes:
        multiplied -= sum(weight.numel() for weight in shapes_of(config)[-1].parameters())
    return 6 * multiplied + 12 * config.num_layers * config.width * config.sequence_length
