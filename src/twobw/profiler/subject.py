"""`Subject`: the layers of a config's model, which of them are equal, and what each is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from twobw.config import Config
from twobw.models.sizes import BertConfig
from twobw.models.whole import model_layers
from twobw.profiler.profile import TieProfile
from twobw.profiler.solo import Given, Loss, SoloLayer
from twobw.runtime.layers import find_ties
from twobw.runtime.messages import Layout, Message
from twobw.runtime.randomness import build_layer

_Signature: TypeAlias = tuple[object, ...]
_NUM_BYTES = 256  # the tokens that every model knows


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as it is profiled; it holds no weights.

    Attributes:
        config: of the run that the profile is for.
        microbatch_sizes: ascending.
        firsts: for each distinct layer the place in the model of the first of its kind.
        layers: for each layer of the model its place in ``firsts``.
        ties: parameters that layers share.
        given: for each microbatch size the layouts of what each distinct layer is given, and of
            what the loss is.
    """

    config: Config
    microbatch_sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    layers: tuple[int, ...]
    ties: tuple[TieProfile, ...]
    given: Mapping[int, tuple[Layout, ...]]

    def counts_a_stage(self) -> list[int]:
        """How often a stage has each distinct layer, on average and at least once."""
        pp = self.config.parallel.pp
        return [max(round(self.layers.count(n) / pp), 1) for n in range(len(self.firsts))]

    def build(self, device: torch.device) -> list[SoloLayer]:
        """The distinct layers and the loss, each alone; of what is tied each has its own."""
        with device:
            builders = _builders(self.config)
            modules = [copy.deepcopy(builders[first]()) for first in self.firsts]
            _, targets = _batch(self.config, self.microbatch_sizes[-1])
        modules.append(Loss(self.config, targets))
        places = (*self.firsts, len(self.layers))
        return [
            SoloLayer(module, place, self.config, device)
            for module, place in zip(modules, places, strict=True)
        ]

    def input(self, number: int, microbatch_size: int, device: torch.device) -> Given:
        """Something of the right shape for a distinct layer, or for the loss after them: part of a
        batch for the first layer, for the others what a stage before them would have sent."""
        if number == 0:
            with device:
                return _batch(self.config, microbatch_size)[0]
        return filled(self.given[microbatch_size][number], device)


def make_subject(config: Config, microbatch_sizes: Sequence[int]) -> Subject:
    """Find out which layers of the model are equal, and what each is given: on the meta device,
    which takes no memory.

    Args:
        config: of the run.
        microbatch_sizes: in samples, ascending.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        modules = [build() for build in _builders(config)]
        ties = _ties(modules)
        walks = [_walk(config, modules, size) for size in microbatch_sizes]
    firsts, layers, _ = walks[0]
    given = {size: walk[2] for size, walk in zip(microbatch_sizes, walks, strict=True)}
    return Subject(config, tuple(microbatch_sizes), firsts, layers, ties, given)


def filled(layout: Layout, device: torch.device) -> Message:
    """A message of this layout: normal numbers, zeros where they are whole numbers."""
    tensors = [None if tensor is None else tensor.empty(device) for tensor in layout.tensors]
    for tensor in tensors:
        if tensor is not None and tensor.is_floating_point():
            tensor.normal_()
        elif tensor is not None:
            tensor.zero_()
    return Message(tuple(tensors), layout)


def _walk(
    config: Config, modules: Sequence[nn.Module], microbatch_size: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Layout, ...]]:
    """`Subject.firsts`, ``layers`` and ``given`` for one microbatch size. Each distinct layer runs
    once."""
    tokens, _ = _batch(config, microbatch_size)
    layout = Message.of(tokens).layout
    entries: dict[tuple[_Signature, Layout], int] = {}
    firsts: list[int] = []
    layers: list[int] = []
    given: list[Layout] = []
    gives: list[Layout] = []
    for place, module in enumerate(modules):
        entry = entries.setdefault((_signature(module), layout), len(entries))
        if entry == len(firsts):
            firsts.append(place)
            given.append(layout)
            solo = SoloLayer(copy.deepcopy(module), place, config, tokens.device)
            value = filled(layout, tokens.device) if place else tokens
            gives.append(solo.forward(0, value).layout)
        layers.append(entry)
        layout = gives[entry]
    return tuple(firsts), tuple(layers), (*given, layout)


def _builders(config: Config) -> list[Callable[[], nn.Module]]:
    """What builds each layer, or gives the one there is, as in a run of ``config``."""
    seed = config.training.seed
    layers = model_layers(config.model.size(), partial(build_layer, seed))
    return [partial(_build, layer, place, seed) for place, layer in enumerate(layers)]


def _build(layer: nn.Module | Callable[[], nn.Module], place: int, seed: int) -> nn.Module:
    return layer if isinstance(layer, nn.Module) else build_layer(seed, place, layer)


def _batch(config: Config, num_samples: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets as the model takes them, drawn at random: ``(b, t)`` each, or ``(b,)``
    targets where samples have classes."""
    size = config.model.size()
    tokens = torch.randint(_NUM_BYTES, (num_samples, size.sequence_length))
    if isinstance(size, BertConfig) and size.num_classes:
        return tokens, torch.randint(size.num_classes, (num_samples,))
    return tokens, torch.randint(_NUM_BYTES, (num_samples, size.sequence_length))


def _signature(module: nn.Module) -> _Signature:
    """What layers that are equal have in common: classes, settings, shapes."""
    settings = tuple(
        (name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str))
    )
    tensors = (*module.named_parameters(), *module.named_buffers())
    shapes = tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)
    return type(module), repr(module), settings, shapes


def _ties(modules: Sequence[nn.Module]) -> tuple[TieProfile, ...]:
    state = nn.ModuleList(modules).state_dict(keep_vars=True)
    return tuple(
        TieProfile(layers=tuple(sorted(tie.name_on)), num_parameters=state[tie.names[0]].numel())
        for tie in find_ties(modules, [1] * len(modules))
    )
