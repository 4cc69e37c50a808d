"""The emulator in one thread is the pipeline, to the bit; what the pipeline lacks is checked
against the rule, written plainly."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import twobw
from benchmarks.delay_rules import Emulator, delay_compensation
from tests.runtime.reference import run_model
from twobw.core.generators import SCHEDULES

SEED = 7


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda batch: 0.5**batch)


def build_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        nn.Conv1d(2, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.Dropout(0.2), nn.LayerNorm(6)),
        nn.GELU(),
        nn.Conv1d(4, 3, 3),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 1)),
    ]


@cache
def batches(count: int = 5) -> tuple[tuple[Tensor, Tensor], ...]:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(11, 2, 6, generator=generator) for _ in range(count)]
    return tuple((x, x.sum(dim=(1, 2)).tanh()[:, None]) for x in inputs)


def sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).square().sum(), float(len(target))


def emulated(
    schedule: str, pp: int, m: int, *, loss_fn: Any = None, drain_after: Any = (), **more: Any
) -> tuple[dict[str, Tensor], list[float]]:
    emulator = Emulator(
        build_layers(), loss_fn or nn.MSELoss(), adamw, schedule, m, pp=pp, seed=SEED, **more
    )
    for number, pair in enumerate(batches()):
        emulator.train_step(*pair)
        if number in drain_after:
            emulator.drain()
    return emulator.state_dict(), emulator.losses


def piped(
    schedule: str, pp: int, m: int, *, loss_fn: Any = None, **more: Any
) -> tuple[dict[str, Tensor], list[float]]:
    with twobw.Pipeline(
        build_layers(),
        loss_fn or nn.MSELoss(),
        adamw,
        schedule,
        m,
        pp=pp,
        seed=SEED,
        timeout=30,
        **more,
    ) as pipeline:
        results = [pipeline.train_step(*pair) for pair in batches()]
        state = pipeline.full_state_dict()
        assert state is not None
        return state, [float(result.loss) for result in results]


def assert_equal(
    own: tuple[dict[str, Tensor], list[float]], other: tuple[dict[str, Tensor], list[float]]
) -> None:
    assert list(own[0]) == list(other[0])
    assert not [name for name in own[0] if not torch.equal(own[0][name], other[0][name])]
    assert own[1] == other[1]


@pytest.mark.filterwarnings("ignore:2bw", "ignore:paci")
@pytest.mark.parametrize(("pp", "m"), [(1, 2), (2, 1), (2, 2), (2, 4), (3, 4), (4, 2), (4, 8)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_pipeline(schedule: str, pp: int, m: int) -> None:
    assert_equal(emulated(schedule, pp, m), piped(schedule, pp, m))


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "weight-stashing"])
@pytest.mark.parametrize(
    "features",
    [
        {"max_grad_norm": 0.05},
        {"lr_scheduler": halving},
        {"loss_fn": sum_and_weight},
        {"loss_fn": sum_and_weight, "max_grad_norm": 0.05, "lr_scheduler": halving},
        {"split": [2, 1, 3]},
    ],
    ids=lambda features: "-".join(features),
)
def test_features_equal_the_pipelines(schedule: str, features: dict[str, Any]) -> None:
    assert_equal(emulated(schedule, 3, 4, **features), piped(schedule, 3, 4, **features))


@pytest.mark.parametrize("flush_batches", [0, 2])
@pytest.mark.parametrize(
    ("schedule", "options", "lookahead"),
    [
        ("2bw", {}, 0.0),
        ("2bw", {}, 1.0),
        ("2bw-fresh", {"update_lag": 1}, 0.0),
        ("2bw-fresh", {"update_lag": 1}, 0.5),
        ("2bw-fresh", {"update_lag": 0, "extra_in_flight": 1}, 1.0),
        ("paci", {}, 0.0),
    ],
)
def test_the_family_around_two_bw_equals_the_pipelines(
    schedule: str, options: dict[str, int], lookahead: float, flush_batches: int
) -> None:
    more = {"flush_batches": flush_batches, "lookahead": lookahead, "max_grad_norm": 0.05}
    assert_equal(
        emulated(schedule, 3, 4, options=options, **more), piped(schedule, 3, 4, **options, **more)
    )


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh", "gpipe"])
def test_draining_changes_nothing(schedule: str) -> None:
    options = {"update_lag": 2} if schedule == "2bw-fresh" else {}
    assert_equal(
        emulated(schedule, 3, 4, options=options, drain_after=(0, 2)),
        emulated(schedule, 3, 4, options=options),
    )


def by_the_rule(
    old_microbatches: list[int],
    m: int,
    split: list[int],
    *,
    lookahead: float = 0.0,
    flush_batches: int = 0,
    backward_on_newest: bool = False,
    max_grad_norm: float | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Batch k's first ``old_microbatches[s]`` on stage s run on version k - 1 (extrapolated), the
    others on version k; or only their forwards do. Every version is kept."""
    model = nn.Sequential(*build_layers())
    worker = copy.deepcopy(model)
    optimizer = adamw(list(model.named_parameters()))
    stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
    old = {n: old_microbatches[stage_of[int(n[0])]] for n, _ in model.named_parameters()}
    newest = ahead = older_ahead = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []
    for k, (inputs, targets) in enumerate(batches()):
        total = 0.0
        pieces = zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True)
        for j, (x, y) in enumerate(pieces):
            for name, parameter in worker.named_parameters():
                is_old = k > flush_batches and j < old[name]
                parameter.data.copy_(older_ahead[name] if is_old else newest[name])
            output = run_model(worker, x, seed=SEED, batch=k, microbatch=j)
            if backward_on_newest:
                for name, parameter in worker.named_parameters():
                    parameter.data.copy_(newest[name])
            share = len(x) / len(inputs)
            loss = nn.functional.mse_loss(output, y)
            total += loss.item() * share
            (loss * share).backward()
        for parameter, ran in zip(model.parameters(), worker.parameters(), strict=True):
            parameter.grad, ran.grad = ran.grad, None
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(total)
        before, older_ahead = newest, ahead
        newest = {n: p.detach().clone() for n, p in model.named_parameters()}
        ahead = newest
        if lookahead and k >= flush_batches:
            ahead = {
                n: before[n].clone().mul_(-lookahead).add_(w, alpha=1 + lookahead)
                for n, w in newest.items()
            }
    for name, buffer in model.named_buffers():
        buffer.copy_(worker.get_buffer(name))
    return model.state_dict(), losses


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"lookahead": 1.0},
        {"lookahead": 0.5, "flush_batches": 2},
        {"max_grad_norm": 0.05, "lookahead": 1.0},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
@pytest.mark.parametrize(
    ("schedule", "options", "old_microbatches"),
    [
        ("2bw", {}, [4, 4, 4]),
        ("2bw-fresh", {}, [2, 1, 0]),
        ("2bw-fresh", {"update_lag": 1}, [3, 2, 1]),
        ("2bw-fresh", {"extra_in_flight": 1, "update_lag": 1}, [4, 3, 1]),
        ("paci", {}, [2, 1, 0]),
        ("1f1b", {}, [0, 0, 0]),
    ],
)
def test_is_the_rule_written_plainly(
    schedule: str, options: dict[str, int], old_microbatches: list[int], more: dict[str, Any]
) -> None:
    split = [2, 2, 2]
    own = emulated(schedule, 3, 4, split=split, options=options, **more)
    plain = by_the_rule(old_microbatches, 4, split, backward_on_newest=schedule == "paci", **more)
    assert own[1] == pytest.approx(plain[1], rel=1e-6)  # these losses were summed in fp32
    assert_equal((own[0], []), (plain[0], []))


def test_the_delay_is_real() -> None:
    states = [
        emulated("1f1b", 2, 4)[0],
        emulated("2bw", 2, 4)[0],
        emulated("2bw", 2, 4, lookahead=1.0)[0],
        emulated("2bw-fresh", 2, 4)[0],
        emulated("paci", 2, 4)[0],
        emulated("2bw", 2, 4, correction=delay_compensation(1.0))[0],
        emulated("2bw", 2, 4, flush_batches=2)[0],
    ]
    weights = [state["4.weight"] for state in states]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_delay_compensation() -> None:
    gradients, newest, older = [torch.tensor([2.0]), None], [torch.tensor([3.0])] * 2, [1.0, 1.0]
    delay_compensation(0.5)(gradients, newest, [torch.tensor([w]) for w in older], 0.25)
    assert gradients == [torch.tensor([2.0 + 0.5 * 4.0 * 2.0 * 0.25]), None]


def test_evaluates_the_newest_weights_in_eval_mode() -> None:
    emulator = Emulator(build_layers(), nn.MSELoss(), adamw, "2bw", 2, pp=2, seed=SEED)
    for pair in batches():
        emulator.train_step(*pair)
    state = emulator.state_dict()
    model = nn.Sequential(*build_layers())
    model.load_state_dict(state)
    model.eval()
    expected = [nn.functional.mse_loss(model(x), y).item() for x, y in batches()]
    assert emulator.evaluate(batches()) == pytest.approx(sum(expected) / len(expected))


def test_a_tensor_that_is_not_used_and_a_frozen_layer() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), x

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0]

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        frozen = nn.Linear(3, 3).requires_grad_(False)
        return [frozen, nn.Linear(3, 3), Pair(), First(), nn.Linear(3, 1)]

    data = [(x.mean(dim=1)[:, :3], y) for x, y in batches()]
    emulator = Emulator(layers(), nn.MSELoss(), adamw, "2bw", 2, [1, 2, 2], 3, seed=SEED)
    pipeline = twobw.Pipeline(
        layers(), nn.MSELoss(), adamw, "2bw", 2, [1, 2, 2], 3, seed=SEED, timeout=30
    )
    with pipeline:
        for pair in data:
            emulator.train_step(*pair)
            pipeline.train_step(*pair)
        expected = pipeline.full_state_dict()
    assert expected is not None
    assert_equal((emulator.state_dict(), []), (expected, []))


def test_ties_are_refused() -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    with pytest.raises(ValueError, match="no tied weights"):
        Emulator([first, last], nn.MSELoss(), adamw)
