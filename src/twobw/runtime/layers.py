"""From the user's list of layers to one stage's modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from twobw.planner.partition import balance
from twobw.runtime.randomness import build_layer

Layer: TypeAlias = nn.Module | Callable[[], nn.Module]
"""A module, or a callable that builds one on the rank that needs it."""


def choose_split(
    layers: Sequence[Layer], split: Sequence[int] | None, num_stages: int
) -> list[int]:
    """Layers of each stage: as asked, or balanced by number of parameters.

    Raises:
        ValueError: the split does not fit, or there are fewer layers than stages.
    """
    if num_stages > len(layers):
        raise ValueError(
            f"{num_stages} stages need at least as many layers; there are {len(layers)}. "
            "Use fewer stages (pp), or cut the model into more layers"
        )
    if split is None:
        # plus one, so that layers without parameters are spread too
        return balance([_num_parameters(layer) + 1 for layer in layers], num_stages)
    split = list(split)
    if len(split) != num_stages or sum(split) != len(layers) or min(split) < 1:
        raise ValueError(
            f"split = {split} does not fit: it must have {num_stages} entries of at least 1 (one "
            f"a stage) that add up to the {len(layers)} layers"
        )
    return split


def build_layers(layers: Sequence[Layer], first_layer: int, seed: int) -> list[nn.Module]:
    """The modules of a stage, those given by callables built with seed (``seed``, layer).

    Raises:
        TypeError: something is neither a module nor a callable that gives one.
    """
    return [
        layer if isinstance(layer, nn.Module) else build_layer(seed, index, _checked(layer, index))
        for index, layer in enumerate(layers, first_layer)
    ]


def check_no_ties(layers: Sequence[Layer], split: Sequence[int]) -> None:
    """Refuse parameters shared between stages.

    Raises:
        ValueError: which layers share one.
    """
    stage_of: dict[nn.Parameter, tuple[int, int]] = {}
    stages = [stage for stage, count in enumerate(split) for _ in range(count)]
    for index, (layer, stage) in enumerate(zip(layers, stages, strict=True)):
        for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
            other, other_stage = stage_of.setdefault(parameter, (index, stage))
            if other_stage != stage:
                raise ValueError(
                    f"layers {other} and {index} share a parameter but are on stages "
                    f"{other_stage} and {stage}; put them on one stage (split), or untie them"
                )


def _num_parameters(layer: Layer) -> int:
    if not isinstance(layer, nn.Module):
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            layer = layer()
    return sum(parameter.numel() for parameter in layer.parameters())


def _checked(layer: Layer, index: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = layer() if callable(layer) else layer
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise TypeError(
                f"layers[{index}] is or gives a {kind}; a layer is an nn.Module, or a callable "
                "without arguments that builds one"
            )
        return module

    return build
