"""Weights to start from: those of another run, as far as the two models have names in common.

The last layer, the head, may be another one: a BERT that tells classes apart starts from one that
guessed masked bytes. All other layers must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from twobw.config import Config, ConfigError
from twobw.models.transformer import Builder
from twobw.models.whole import shapes_of

_SHOWN = 3  # names in one problem


def check_initial_weights(config: Config) -> None:
    """Compare the names and shapes in ``model.init_from``, if there is one, with the model's.

    Raises:
        ConfigError: the file cannot be read, or its weights do not fit the model.
    """
    path = config.model.init_from
    if not path:
        return
    try:
        with safe_open(_path(path), framework="pt") as file:
            found = {
                name: tuple(file.get_slice(stored).get_shape())
                for name, stored in _stored_names(file).items()
            }
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.init_from = {path}", [f"cannot be read: {error}"]) from error
    state = shapes_of(config.model.size()).state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if problems := _problems(found, wanted, config.model.size().list_length):
        raise ConfigError(f"model.init_from = {path}", problems)


def start_from(layers: Sequence[nn.Module | Builder], path: str) -> list[nn.Module | Builder]:
    """The layers with the weights of a file that `check_initial_weights` has passed; those that
    are built by a callable are given their weights when they are built."""
    return [
        _load(layer, index, path)
        if isinstance(layer, nn.Module)
        else partial(_build_and_load, layer, index, path)
        for index, layer in enumerate(layers)
    ]


def _build_and_load(builder: Builder, index: int, path: str) -> nn.Module:
    return _load(builder(), index, path)


def _load(layer: nn.Module, index: int, path: str) -> nn.Module:
    """Give a layer those of its weights that the file has; not where it has no memory for any,
    since only its parameters are counted."""
    if any(parameter.is_meta for parameter in layer.parameters()):
        return layer
    weights: dict[str, Tensor] = {}
    with safe_open(_path(path), framework="pt") as file:
        names = _stored_names(file)
        for name in layer.state_dict():
            if stored := names.get(f"{index}.{name}"):
                weights[name] = file.get_tensor(stored)
    layer.load_state_dict(weights, strict=False)
    return layer


def _path(path: str) -> Path:
    return Path(path).expanduser()


def _stored_names(file: safe_open) -> dict[str, str]:
    """For each name that a weight has in the model, the one that it is stored under: of tied ones,
    which share one, the file's metadata tells the others."""
    stored = {name: name for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    return stored | {k: v for k, v in (file.metadata() or {}).items() if v in stored}


def _problems(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    list_length: int,
) -> list[str]:
    """What keeps the weights found from being those of a model of ``list_length`` layers."""
    numbers = [name.partition(".")[0] for name in found]
    if not (numbers and all(number.isdecimal() for number in numbers)):
        return ["is not a file of weights that twobw train has written"]
    if (count := max(map(int, numbers)) + 1) != list_length:
        return [
            f"has {count} layers (embedding, {count - 2} blocks, head), but the model has "
            f"{list_length}; set model.num_layers = {count - 2}"
        ]
    head = f"{list_length - 1}."
    missing = [name for name in wanted if name not in found and not name.startswith(head)]
    more = [name for name in found if name not in wanted and not name.startswith(head)]
    other = [
        f"{name}, {list(found[name])} there and {list(shape)} in the model"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    return [
        f"{what}: {_few(names)}"
        for what, names in (
            ("lacks weights of the model", missing),
            ("has weights that the model has not", more),
            ("has weights of other shapes", other),
        )
        if names
    ]


def _few(names: Sequence[str]) -> str:
    left = len(names) - _SHOWN
    return "; ".join(names[:_SHOWN]) + (f"; and {left} more" if left > 0 else "")
