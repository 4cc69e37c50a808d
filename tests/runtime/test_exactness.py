"""The pipeline's weights and losses are those of the plainly written references, to the bit."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

import twobw
from tests.runtime.reference import train_delayed, train_plain, train_stashed

SEED = 7
OPTIMIZERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.005, momentum=0.9, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01),
}


def build_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.Dropout(0.2), nn.LayerNorm(6)),
        nn.GELU(),
        nn.Conv1d(4, 3, 3),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 1)),
    )


@cache
def build_data(num_batches: int = 5) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    generator = torch.Generator().manual_seed(5)
    pairs = []
    for _ in range(num_batches):
        inputs = torch.randn(11, 2, 6, generator=generator)
        pairs.append((inputs, inputs.sum(dim=(1, 2)).tanh()[:, None]))
    return tuple(pairs)


@cache
def reference(schedule: str, optimizer: str, m: int, split: tuple[int, ...]):
    model, make = build_model(), OPTIMIZERS[optimizer]
    if schedule == "weight-stashing":
        losses = train_stashed(model, nn.MSELoss(), make, build_data(), m, split, SEED)
    elif schedule == "2bw":
        losses = train_delayed(model, nn.MSELoss(), make, build_data(), m, SEED)
    else:
        losses = train_plain(model, nn.MSELoss(), make, build_data(), m, SEED)
    return model.state_dict(), losses


def run_pipeline(schedule: str, optimizer: str, pp: int, m: int, drain_after=(), **options):
    with twobw.Pipeline(
        list(copy.deepcopy(build_model())),
        nn.MSELoss(),
        OPTIMIZERS[optimizer],
        schedule,
        m,
        pp=pp,
        seed=SEED,
        timeout=30,
        **options,
    ) as pipeline:
        results = []
        for batch, pair in enumerate(build_data()):
            results.append(pipeline.train_step(*pair))
            if batch in drain_after:
                pipeline.drain()
        return pipeline.full_state_dict(), [float(r.loss) for r in results], pipeline.split


def assert_equal_to_the_bit(state: dict, expected: dict) -> None:
    assert list(state) == list(expected)
    assert all(tensor.isfinite().all() for tensor in expected.values())
    different = [name for name in expected if not torch.equal(state[name], expected[name])]
    assert not different


@pytest.mark.filterwarnings("ignore:2bw with")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe", "weight-stashing", "no-pipeline"])
def test_equals_the_reference(schedule: str, pp: int, m: int, optimizer: str) -> None:
    state, losses, split = run_pipeline(schedule, optimizer, pp, m)
    key = tuple(split) if schedule == "weight-stashing" else ()
    expected, expected_losses = reference(schedule, optimizer, m, key)
    assert_equal_to_the_bit(state, expected)
    assert losses == expected_losses


@pytest.mark.parametrize("schedule", ["2bw", "weight-stashing", "gpipe"])
def test_draining_on_the_way_changes_nothing(schedule: str) -> None:
    state, losses, split = run_pipeline(schedule, "adamw", 3, 2, drain_after=(0, 2, 3))
    key = tuple(split) if schedule == "weight-stashing" else ()
    expected, expected_losses = reference(schedule, "adamw", 2, key)
    assert_equal_to_the_bit(state, expected)
    assert losses == expected_losses


def test_extra_in_flight_changes_nothing() -> None:
    state, _, _ = run_pipeline("2bw", "adamw", 3, 4, extra_in_flight=1)
    assert_equal_to_the_bit(state, reference("2bw", "adamw", 4, ())[0])


def test_the_delay_is_real() -> None:
    """2BW is not plain training: its second update already uses an older gradient."""
    delayed, losses = reference("2bw", "sgd", 2, ())
    plain, plain_losses = reference("1f1b", "sgd", 2, ())
    assert not torch.equal(delayed["4.weight"], plain["4.weight"])
    assert losses[0] == plain_losses[0]
    assert losses[1] != plain_losses[1]
