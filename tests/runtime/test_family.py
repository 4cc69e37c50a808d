"""The schedules around 2BW, look-ahead and the flushed start, beside the plain reference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import twobw
from tests.runtime.reference import stale_first, train
from tests.runtime.test_exactness import (
    OPTIMIZERS,
    SEED,
    assert_equal_to_the_bit,
    build_data,
    build_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*microbatches on .* stages runs at")


def run(schedule: str, optimizer: str, pp: int, m: int, **options: Any):
    """State, losses and split of a pipeline of threads."""
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
        results = [pipeline.train_step(*pair) for pair in build_data()]
        return pipeline.full_state_dict(), [float(r.loss) for r in results], pipeline.split


def expect(optimizer: str, m: int, **options: Any):
    model = build_model()
    losses = train(model, nn.MSELoss(), OPTIMIZERS[optimizer], build_data(), m, SEED, **options)
    return model.state_dict(), losses


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("lag", [0, 1, 9])
@pytest.mark.parametrize("lookahead", [0.0, 0.7])
def test_2bw_fresh(lookahead: float, lag: int, pp: int, m: int, optimizer: str) -> None:
    state, losses, split = run("2bw-fresh", optimizer, pp, m, update_lag=lag, lookahead=lookahead)
    delay = stale_first(split, m, lag)
    expected, expected_losses = expect(optimizer, m, delay=delay, lookahead=lookahead)
    assert_equal_to_the_bit(state, expected)
    assert losses == expected_losses


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_paci(pp: int, m: int, optimizer: str) -> None:
    state, losses, split = run("paci", optimizer, pp, m)
    expected, expected_losses = expect(
        optimizer, m, delay=stale_first(split, m), backward_on_newest=True
    )
    assert_equal_to_the_bit(state, expected)
    assert losses == expected_losses


@pytest.mark.parametrize("lookahead", [0.5, 1.0])
@pytest.mark.parametrize("flush_batches", [0, 1, 2, 9])
@pytest.mark.parametrize("pp", [2, 3])
def test_2bw_with_lookahead_after_a_flushed_start(
    pp: int, flush_batches: int, lookahead: float
) -> None:
    options = {"lookahead": lookahead, "flush_batches": flush_batches}
    state, losses, _ = run("2bw", "adamw", pp, 3, **options)
    expected, expected_losses = expect("adamw", 3, delay=1, **options)
    assert_equal_to_the_bit(state, expected)
    assert losses == expected_losses


def test_extra_in_flight_makes_more_microbatches_stale() -> None:
    state, _, split = run("2bw-fresh", "adamw", 3, 8, extra_in_flight=1)
    assert split == [3, 2, 1]

    def delay(layer: int, place: int) -> int:
        return int(place < (4, 4, 4, 2, 2, 0)[layer])

    assert_equal_to_the_bit(state, expect("adamw", 8, delay=delay)[0])


def test_each_rule_is_another() -> None:
    """A control: none of the above holds for want of a difference."""
    delays = [1, 0, stale_first([3, 3], 4), stale_first([3, 3], 4, 1)]
    outcomes = [expect("momentum", 4, delay=delay)[0] for delay in delays]
    outcomes.append(expect("momentum", 4, delay=1, lookahead=1.0)[0])
    outcomes.append(expect("momentum", 4, delay=1, flush_batches=2)[0])
    newest = {"delay": stale_first([3, 3], 4), "backward_on_newest": True}
    outcomes.append(expect("momentum", 4, **newest)[0])
    weights = {tuple(state["0.weight"].flatten().tolist()) for state in outcomes}
    assert len(weights) == len(outcomes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh"])
def test_evaluation_and_export_use_the_weights_themselves(schedule: str, precision: str) -> None:
    """Not the extrapolated ones, and training goes on as if nothing had happened."""
    layers = [nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 1)]
    generator = torch.Generator().manual_seed(2)
    data = [(torch.randn(12, 6, generator=generator),) * 2 for _ in range(5)]
    data = [(x, x.sum(1, keepdim=True)) for x, _ in data]

    def trained(*, looks: bool):
        with twobw.Pipeline(
            copy.deepcopy(layers),
            nn.functional.mse_loss,
            OPTIMIZERS["adamw"],
            schedule,
            3,
            pp=2,
            lookahead=1.0,
            precision=precision,
            timeout=30,
        ) as pipeline:
            for pair in data:
                pipeline.train_step(*pair)
                if looks:
                    loss = pipeline.evaluate(*data[0], num_microbatches=12)
                    model = nn.Sequential(*copy.deepcopy(layers))
                    model.load_state_dict(pipeline.full_state_dict())
                    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
                    with torch.no_grad():
                        output = model.to(dtype)(data[0][0].to(dtype)).float()
                    expected = nn.functional.mse_loss(output, data[0][1]).item()
                    assert loss == pytest.approx(expected, rel=1e-5)
            return pipeline.full_state_dict()

    assert_equal_to_the_bit(trained(looks=True), trained(looks=False))


def num_copies(pipeline: twobw.Pipeline, rank: int) -> int:
    """Storages of the first parameter of a rank."""
    weights = pipeline._ranks[rank]._weights
    lists = [weights._masters, *weights._slots, weights._unextrapolated or weights._masters]
    return len({parameters[0].untyped_storage().data_ptr() for parameters in lists})


@pytest.mark.parametrize(
    ("schedule", "lookahead", "precision", "copies"),
    [
        ("1f1b", 1.0, "fp32", [1, 1]),
        ("2bw", 0.0, "fp32", [2, 2]),
        ("2bw", 1.0, "fp32", [3, 3]),
        ("2bw-fresh", 0.0, "fp32", [2, 1]),
        ("2bw-fresh", 1.0, "fp32", [3, 1]),
        ("paci", 0.0, "fp32", [1, 1]),
        ("2bw", 1.0, "bf16", [3, 3]),  # one of them the fp32 main weights
        ("2bw-fresh", 1.0, "bf16", [4, 2]),
    ],
)
def test_no_copy_more_than_said(
    schedule: str, lookahead: float, precision: str, copies: list[int]
) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
    with twobw.Pipeline(
        layers,
        nn.MSELoss(),
        OPTIMIZERS["adamw"],
        schedule,
        2,
        pp=2,
        lookahead=lookahead,
        precision=precision,
    ) as pipeline:
        for _ in range(4):
            pipeline.train_step(torch.ones(4, 4), torch.ones(4, 1))
        pipeline.drain()
        assert [num_copies(pipeline, rank) for rank in range(2)] == copies


class TestUpdateLag:
    @staticmethod
    def pipeline(**options: Any) -> twobw.Pipeline:
        layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
        options = {"num_microbatches": 4, "pp": 3, "timeout": 30} | options
        return twobw.Pipeline(layers, nn.MSELoss(), OPTIMIZERS["adamw"], "2bw-fresh", **options)

    def test_is_0_where_nothing_is_reduced(self) -> None:
        with self.pipeline() as pipeline:
            assert pipeline.update_lag == 0

    def test_is_0_on_one_stage(self) -> None:
        """Replicas of a whole model train as one process would."""
        with self.pipeline(pp=1, dp=2) as pipeline:
            assert pipeline.update_lag == 0

    def test_is_0_where_reductions_are_waited_for(self) -> None:
        with self.pipeline(max_grad_norm=1.0, overlap_reduce=False) as pipeline:
            assert pipeline.update_lag == 0

    def test_is_measured_over_the_first_batches(self) -> None:
        """And the same on every rank."""
        with self.pipeline(max_grad_norm=1.0) as pipeline:
            for batch in range(10):
                assert (pipeline.update_lag is None) == (batch <= 8)
                pipeline.train_step(torch.ones(4, 4), torch.ones(4, 1))
            pipeline.drain()
            lags = {rank.update_lag for rank in pipeline._ranks}
            assert len(lags) == 1
            assert 1 <= lags.pop() <= 4

    def test_is_measured_over_a_flushed_start(self) -> None:
        with self.pipeline(max_grad_norm=1.0, flush_batches=3) as pipeline:
            for _ in range(4):
                pipeline.train_step(torch.ones(4, 4), torch.ones(4, 1))
            assert pipeline.update_lag is not None

    def test_as_given(self) -> None:
        with self.pipeline(max_grad_norm=1.0, update_lag=2) as pipeline:
            assert pipeline.update_lag == 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("schedule", "options", "message"),
        [
            ("2bw", {"lookahead": -1.0}, "lookahead = -1.0; it must be at least 0"),
            ("2bw", {"lookahead": float("nan")}, "lookahead = nan; it must be at least 0"),
            ("2bw", {"flush_batches": -1}, "flush_batches = -1; it must be at least 0"),
            ("2bw", {"update_lag": 1}, "does not know the option 'update_lag'"),
            ("2bw-fresh", {"update_lag": -1}, "update_lag is -1; it must be at least 0"),
            ("paci", {"lookahead": 1.0}, "lookahead does not go with schedule = 'paci'"),
            ("weight-stashing", {"lookahead": 1.0}, "lookahead does not go with"),
        ],
    )
    def test_settings(self, schedule: str, options: dict, message: str) -> None:
        layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
        with pytest.raises(ValueError, match=message):
            twobw.Pipeline(layers, nn.MSELoss(), OPTIMIZERS["adamw"], schedule, pp=3, **options)
