import pytest
import torch
from torch import nn

from twobw.runtime.weights import VersionedWeights


def add_one(weights: VersionedWeights) -> None:
    """An update that adds 1 to every weight."""

    def step(places) -> None:
        with torch.no_grad():
            for _, parameter in weights.optimizer_parameters():
                parameter.add_(1)

    weights.update([None] * len(weights.names), step)


def storages(weights: VersionedWeights) -> set[int]:
    everything = [p for _, p in weights.optimizer_parameters()]
    everything += [p for slot in weights._slots for p in slot]
    return {parameter.untyped_storage().data_ptr() for parameter in everything}


def test_two_slots_hold_two_versions_and_the_optimizer_owns_no_storage() -> None:
    layer = nn.Linear(3, 2)
    weights = VersionedWeights([("0", layer)], 2)
    for _ in range(5):
        add_one(weights)
        assert len(storages(weights)) == 2 * 2


def test_switching_copies_nothing() -> None:
    layer = nn.Linear(3, 2)
    first = layer.weight.detach().clone()
    weights = VersionedWeights([("0", layer)], 2)
    add_one(weights)
    seen = {}
    for version in (0, 1, 0, 1):
        weights.install(version)
        assert torch.equal(layer.weight, first + version)
        assert seen.setdefault(version, layer.weight) is layer.weight


@pytest.mark.parametrize("version", [0, 3, -1])
def test_a_version_not_held_is_refused(version: int) -> None:
    weights = VersionedWeights([("0", nn.Linear(1, 1))], 2)
    add_one(weights)
    add_one(weights)
    with pytest.raises(ValueError, match=f"weight version {version} is not held"):
        weights.install(version)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 4), (2, 4)),
        (nn.LayerNorm(4), (2, 4)),
        (nn.Conv1d(4, 4, 1), (2, 4, 3)),
        (nn.BatchNorm1d(4), (3, 4)),
        (nn.LSTM(4, 4), (2, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_backward_through_an_overwritten_version_is_an_error(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    weights = VersionedWeights([("0", layer)], 2)
    inputs = torch.ones(shape, requires_grad=True)

    def loss() -> torch.Tensor:
        output = layer(inputs)
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    kept = loss()  # on version 0
    add_one(weights)
    kept.backward()  # still held: fine
    kept = loss()  # on version 0 again, which is still installed
    add_one(weights)  # version 2 takes its slot
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_recurrent_layers_use_the_installed_version() -> None:
    """They keep a flat list of their weights beside the parameters."""
    layer = nn.LSTM(2, 2)
    weights = VersionedWeights([("0", layer)], 2)
    inputs = torch.ones(1, 2)
    before = layer(inputs)[0]
    add_one(weights)
    weights.install(1)
    assert not torch.equal(layer(inputs)[0], before)
    weights.install(0)
    assert torch.equal(layer(inputs)[0], before)


def test_gradients_accumulate_in_place_across_versions() -> None:
    layer = nn.Linear(1, 1, bias=False)
    weights = VersionedWeights([("0", layer)], 2)
    add_one(weights)
    gradients: list[torch.Tensor | None] = [None]
    for version, value in ((0, 2.0), (1, 3.0)):
        weights.install(version)
        output = layer(torch.tensor([value]))
        with weights.accumulate(gradients):
            output.backward()
        assert layer.weight.grad is None
    assert gradients == [torch.tensor([[5.0]])]


def test_frozen_parameters_are_shared_by_all_versions() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    weights = VersionedWeights([("0", layer)], 2)
    bias = layer.bias
    add_one(weights)
    weights.install(1)
    assert weights.names == ["0.weight"]
    assert layer.bias is bias


def test_a_parameter_in_two_places_is_held_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    weights = VersionedWeights([("0", first), ("1", second)], 2)
    add_one(weights)
    weights.install(1)
    assert weights.names == ["0.weight", "0.bias", "1.bias"]
    assert first.weight is second.weight
