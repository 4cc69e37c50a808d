"""Checkpoints of a pipeline: going on to the bit, on the same layout and on others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

import twobw
from tests.runtime import reference
from tests.runtime.reference import stale_first
from tests.runtime.test_features import SEED, adamw, build, build_data, momentum, without_buffers
from twobw.runtime.layers import choose_split

pytestmark = pytest.mark.filterwarnings("ignore:2bw with", "ignore:2bw.* microbatches on")


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda batch: 1 / (1 + batch))


def two_groups(named: list) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW, in two groups, for the rest: stages differ in what they have."""
    matrices = [pair for pair in named if pair[1].ndim == 2]
    rest = [pair for pair in named if pair[1].ndim != 2]
    weights = [pair for pair in rest if "weight" in pair[0]]
    biases = [pair for pair in rest if "weight" not in pair[0]]
    groups = [{"params": weights, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}]
    adam = [torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01)] if rest else []
    return [*([torch.optim.Muon(matrices, lr=0.02)] if matrices else []), *adam]


def make(model: nn.Sequential, **options: Any) -> twobw.Pipeline:
    defaults = {"optimizer": adamw, "num_microbatches": 2, "pp": 2, "seed": SEED, "timeout": 30}
    return twobw.Pipeline(list(copy.deepcopy(model)), nn.MSELoss(), **defaults | options)


def train(pipeline: twobw.Pipeline, data: list) -> list[float]:
    results = [pipeline.train_step(*pair) for pair in data]
    return [float(result.loss) for result in results]


def state_of(pipeline: twobw.Pipeline) -> dict[str, torch.Tensor]:
    state = pipeline.full_state_dict()
    assert state is not None
    return state


def go_on(
    folder: Path,
    model: nn.Sequential,
    before: dict[str, Any],
    after: dict[str, Any],
    data: list,
    at: int,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run that is saved and loaded into a new pipeline on the way."""
    with make(model, **before) as pipeline:
        losses = train(pipeline, data[:at])
        pipeline.save(folder, {"samples": 17})
    with make(model, **after) as pipeline:
        manifest = pipeline.load(folder)
        assert (manifest.progress.batch, manifest.notes) == (at, {"samples": 17})
        losses += train(pipeline, data[at:])
        return losses, state_of(pipeline)


def assert_same(
    found: tuple[list[float], dict], expected: tuple[list[float], dict], rtol: float = 0.0
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rtol, abs=rtol and 1e-7)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=rtol, atol=rtol / 100, msg=name)


SAME: list[dict[str, Any]] = [
    {"schedule": "2bw"},
    {"schedule": "2bw", "pp": 3, "lookahead": 0.8},
    {"schedule": "2bw", "precision": "bf16"},
    {"schedule": "2bw", "precision": "bf16", "lookahead": 0.8, "recompute": "layer"},
    {"schedule": "2bw", "precision": "fp16", "max_grad_norm": 0.3},
    {"schedule": "2bw", "tied": True, "pp": 3, "max_grad_norm": 0.3},
    {"schedule": "2bw", "optimizer": two_groups, "lr_scheduler": falling, "pp": 3},
    {"schedule": "2bw-fresh", "pp": 3, "num_microbatches": 4},
    {"schedule": "2bw-fresh", "pp": 3, "num_microbatches": 3, "lookahead": 1.0},
    {"schedule": "2bw-fresh", "flush_batches": 2, "lookahead": 0.5},
    {"schedule": "2bw-fresh", "update_lag": 1, "max_grad_norm": 0.3},
    {"schedule": "1f1b", "pp": 3, "optimizer": momentum},
    {"schedule": "gpipe"},
    {"schedule": "no-pipeline", "pp": 1},
    {"schedule": "weight-stashing", "pp": 3},
    {"schedule": "weight-stashing", "pp": 3, "num_microbatches": 1},
    {"schedule": "2bw", "dp": 2},
    {"schedule": "2bw", "dp": 2, "shard_optimizer": True, "optimizer": two_groups},
    {"schedule": "2bw", "dp": 2, "shard_optimizer": True, "tied": True, "precision": "bf16"},
]


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("options", SAME, ids=lambda o: "-".join(map(str, o.values())))
def test_goes_on_to_the_bit(tmp_path: Path, options: dict[str, Any], at: int) -> None:
    options = dict(options)
    model, data = build(tied=options.pop("tied", False)), build_data(num_batches=6)
    with make(model, **options) as pipeline:
        expected = train(pipeline, data), state_of(pipeline)
    assert_same(go_on(tmp_path, model, options, options, data, at), expected)


def plain_model(*, tied: bool = False) -> nn.Sequential:
    """Each sample for itself and nothing random: how a batch is cut matters for rounding only."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 1))
    if tied:
        model[3][1].weight = model[1][1].weight
    return model


AT, LEFT = 4, 10
BW: dict[str, Any] = {"schedule": "2bw", "optimizer": momentum, "lr_scheduler": falling}
# Where replicas, copies of a tied weight, or other microbatches are summed, order decides on the
# last bits.
SUMMED = 1e-4
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    (BW, {**BW, "pp": 3}, 0.0),  # deeper
    ({**BW, "pp": 3}, BW, 0.0),  # shallower
    ({**BW, "pp": 1}, {**BW, "pp": 6}, 0.0),
    ({**BW, "pp": 4}, {**BW, "pp": 1}, 0.0),
    ({**BW, "split": [1, 5]}, {**BW, "split": [5, 1]}, 0.0),
    ({**BW, "optimizer": two_groups}, {**BW, "optimizer": two_groups, "pp": 5}, 0.0),
    ({**BW, "optimizer": two_groups, "pp": 5}, {**BW, "optimizer": two_groups}, 0.0),
    ({**BW, "lookahead": 0.8}, {**BW, "lookahead": 0.8, "pp": 4}, 0.0),
    ({**BW, "precision": "bf16"}, {**BW, "precision": "bf16", "pp": 4}, 0.0),
    ({**BW, "precision": "fp16"}, {**BW, "precision": "fp16", "pp": 1}, 0.0),
    (
        {**BW, "overlap_reduce": True, "max_grad_norm": 0.3},
        {**BW, "max_grad_norm": 0.3, "pp": 3},
        0.0,
    ),
    (BW, {**BW, "dp": 2, "num_microbatches": 1}, SUMMED),  # more replicas
    ({**BW, "dp": 3}, BW, SUMMED),  # fewer
    ({**BW, "pp": 4}, {**BW, "pp": 2, "dp": 2}, SUMMED),
    ({**BW, "dp": 2}, {**BW, "pp": 3, "num_microbatches": 5}, SUMMED),
    ({**BW, "dp": 2, "shard_optimizer": True}, {**BW, "pp": 3}, SUMMED),
    (BW, {**BW, "dp": 3, "shard_optimizer": True}, SUMMED),
    (
        {**BW, "dp": 2, "shard_optimizer": True},
        {**BW, "dp": 3, "shard_optimizer": True, "precision": "fp32"},
        SUMMED,
    ),
    ({**BW, "tied": True}, {**BW, "tied": True, "pp": 1}, SUMMED),
    ({**BW, "tied": True, "pp": 1}, {**BW, "tied": True, "pp": 4}, SUMMED),
    ({**BW, "schedule": "1f1b"}, {**BW, "schedule": "gpipe", "pp": 3}, 0.0),
    ({**BW, "schedule": "gpipe"}, {**BW, "schedule": "no-pipeline", "pp": 1}, 0.0),
]


@pytest.mark.parametrize(("before", "after", "rtol"), LAYOUTS)
def test_goes_on_under_another_layout(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], rtol: float
) -> None:
    before, after = dict(before), dict(after)
    model = plain_model(tied=before.pop("tied", False))
    after.pop("tied", None)
    # another global batch, too
    data = [*build_data(13, AT), *build_data(17, LEFT)]
    with make(model, **before) as pipeline:
        expected = train(pipeline, data), state_of(pipeline)
    assert_same(go_on(tmp_path, model, before, after, data, AT), expected, rtol)


SWITCHES = [
    ("2bw", "1f1b"),
    ("1f1b", "2bw"),
    ("gpipe", "2bw-fresh"),
    ("2bw-fresh", "gpipe"),
    ("weight-stashing", "2bw"),
    ("1f1b", "weight-stashing"),
]


@pytest.mark.parametrize(("first", "second"), SWITCHES)
def test_another_schedule_goes_on_as_set_schedule_does(
    tmp_path: Path, first: str, second: str
) -> None:
    """Where no older version can be used, all start from the newest."""
    model, data = build(), build_data(num_batches=AT + LEFT)
    # the rules of these depend on the depth
    deeper = 2 if second in ("2bw-fresh", "weight-stashing") else 3
    with make(model, schedule=first) as pipeline:
        losses = train(pipeline, data[:AT])
        pipeline.set_schedule(second)
        expected = losses + train(pipeline, data[AT:]), state_of(pipeline)
    options = {"schedule": first}, {"schedule": second, "pp": deeper}
    assert_same(go_on(tmp_path, model, *options, data, AT), expected)


@pytest.mark.parametrize(("pp", "more"), [(2, 3), (3, 2)])
def test_the_fresh_rule_goes_on_with_other_stages(tmp_path: Path, pp: int, more: int) -> None:
    """Layers of a stage without an older version begin with the newest."""
    model, data = without_buffers(), build_data(num_batches=AT + LEFT)
    splits = [choose_split(list(model), None, depth) for depth in (pp, more)]
    old, new = (stale_first(split, 4) for split in splits)
    num_kept = sum(splits[0][:-1])

    def at_switch(layer: int, place: int) -> int:
        return new(layer, place) if layer < num_kept else 0

    delays = [*[old] * AT, at_switch, *[new] * (LEFT - 1)]
    expected = copy.deepcopy(model)
    losses = reference.train(expected, nn.MSELoss(), adamw, data, 4, SEED, delay=delays)
    options = {"schedule": "2bw-fresh", "num_microbatches": 4}
    found = go_on(tmp_path, model, {**options, "pp": pp}, {**options, "pp": more}, data, AT)
    assert_same(found, (losses, expected.state_dict()))


def in_sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """As many schedulers as there are groups at the most; one has a counter in its state."""
    first, second = LinearLR(optimizer, total_iters=3), MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return SequentialLR(optimizer, [first, second], [3])


def test_any_scheduler_goes_on(tmp_path: Path) -> None:
    model, data = plain_model(), build_data(num_batches=AT + LEFT)
    options = {**BW, "optimizer": two_groups, "lr_scheduler": in_sequence}
    with make(model, **options) as pipeline:
        expected = train(pipeline, data), state_of(pipeline)
    assert_same(go_on(tmp_path, model, options, {**options, "pp": 5}, data, AT), expected)


@pytest.mark.parametrize("lookahead", [0.0, 0.8])
def test_saving_changes_nothing(tmp_path: Path, lookahead: float) -> None:
    model, data = build(), build_data(num_batches=6)
    options = {"schedule": "2bw-fresh", "pp": 3, "num_microbatches": 4, "lookahead": lookahead}
    with make(model, **options) as pipeline:
        expected = train(pipeline, data), state_of(pipeline)
    with make(model, **options) as pipeline:
        results = []
        for pair in data:
            results.append(pipeline.train_step(*pair))
            pipeline.save(tmp_path)
        assert_same(([float(r.loss) for r in results], state_of(pipeline)), expected)


def test_a_measured_lag_goes_on(tmp_path: Path) -> None:
    model, data = build(), build_data(num_batches=11)
    options = {"schedule": "2bw-fresh", "num_microbatches": 3, "max_grad_norm": 0.3}
    with make(model, **options) as pipeline:
        losses = train(pipeline, data[:9])
        lag = pipeline.update_lag
        pipeline.save(tmp_path)
        losses += train(pipeline, data[9:])
        expected = losses[9:], state_of(pipeline)
    with make(model, **options) as pipeline:
        pipeline.load(tmp_path)
        assert pipeline.update_lag == lag
        assert_same((train(pipeline, data[9:]), state_of(pipeline)), expected)
    with make(model, **options, pp=3) as pipeline:  # the lag of two stages says nothing of three
        pipeline.load(tmp_path)
        assert (pipeline.update_lag, len(train(pipeline, build_data(num_batches=9)))) == (None, 9)
        assert pipeline.update_lag is not None


def test_look_ahead_from_the_first_version() -> None:
    """A schedule that is set before the first batch changes nothing."""
    model, data = build(), build_data(num_batches=5)
    options = {"schedule": "2bw", "lookahead": 0.8}
    with make(model, **options) as pipeline:
        expected = train(pipeline, data), state_of(pipeline)
    with make(model, **options) as pipeline:
        pipeline.set_schedule("2bw")
        assert_same((train(pipeline, data), state_of(pipeline)), expected)
