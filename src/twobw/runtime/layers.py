"""From the user's list of layers to one stage's modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

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
        costs = [_num_parameters(layer, index) + 1 for index, layer in enumerate(layers)]
        return balance(costs, num_stages)
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


@dataclass(frozen=True, slots=True)
class TiedNames:
    """A parameter or a buffer that several stages have.

    Attributes:
        names: in ``nn.Sequential(*layers)``; the first is the owner's.
        name_on: for each stage that has it, the first of the names there.
    """

    names: tuple[str, ...]
    name_on: dict[int, str]

    @property
    def aliases(self) -> tuple[str, ...]:
        """All names but the owner's."""
        return self.names[1:]


def find_ties(layers: Sequence[Layer], split: Sequence[int]) -> list[TiedNames]:
    """The parameters that are the same object on several stages."""
    return _shared(layers, split, lambda layer: layer.named_parameters(remove_duplicate=False))


def owners_names(ties: Iterable[TiedNames], stage: int) -> dict[str, str]:
    """The owner's name of each tied parameter that a stage has, by the name there."""
    return {tie.name_on[stage]: tie.names[0] for tie in ties if stage in tie.name_on}


def find_shared_buffers(layers: Sequence[Layer], split: Sequence[int]) -> list[TiedNames]:
    """The buffers that are the same object on several stages."""
    return _shared(layers, split, lambda layer: layer.named_buffers(remove_duplicate=False))


def _shared(
    layers: Sequence[Layer],
    split: Sequence[int],
    named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]],
) -> list[TiedNames]:
    stages = [stage for stage, count in enumerate(split) for _ in range(count)]
    places: dict[Tensor, list[tuple[int, str]]] = {}
    for index, (layer, stage) in enumerate(zip(layers, stages, strict=True)):
        if isinstance(layer, nn.Module):
            for name, tensor in named(layer):
                places.setdefault(tensor, []).append((stage, f"{index}.{name}"))
    return [
        TiedNames(tuple(name for _, name in found), dict(reversed(found)))
        for found in places.values()
        if len({stage for stage, _ in found}) > 1
    ]


class ConstantBuffers:
    """Buffers that other stages have, too. Nothing carries their changes from stage to stage, so
    no forward may change them (tables and masks, but no statistics).

    Args:
        buffers: by their names in the unsplit model.
    """

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self._kept = {name: buffer.detach().clone() for name, buffer in buffers.items()}

    def check(self, buffers: dict[str, Tensor]) -> None:
        """Compare with those of now.

        Raises:
            ValueError: one has changed.
        """
        for name, kept in self._kept.items():
            if not _same_bits(kept, buffers[name]):
                raise ValueError(
                    f"the buffer {name}, which layers on several stages share, was changed by a "
                    "forward; stages do not see each other's changes. Give split such that these "
                    "layers are on one stage, or give each a buffer of its own"
                )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def copies_where_shared(
    layers: Sequence[Layer], taken: set[nn.Module | nn.Parameter]
) -> list[Layer]:
    """A stage's layers, copied if another stage of this process has some part of them; what they
    consist of is added to ``taken``."""
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    parts = {part for module in modules for part in module.modules()}
    parameters = {parameter for module in modules for parameter in module.parameters()}
    is_shared = not taken.isdisjoint(parts | parameters)
    taken |= parts | parameters
    if not is_shared:
        return list(layers)
    copied = iter(copy.deepcopy(modules))
    return [next(copied) if isinstance(layer, nn.Module) else layer for layer in layers]


def _num_parameters(layer: Layer, index: int) -> int:
    if not isinstance(layer, nn.Module):
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                layer = _checked(layer, index)()
        except Exception as error:
            error.add_note(
                f"while layers[{index}] was built on the meta device, to count its parameters; "
                "give split, and each layer is built only on its own rank"
            )
            raise
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
