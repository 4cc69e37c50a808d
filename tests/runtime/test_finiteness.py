"""Values that are not finite: where they first came about, and updates that are left out."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import twobw
from twobw.runtime.finiteness import NonFinite


class Poisoned(nn.Module):
    """Gives NaN for samples whose first value is above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.where(x[:, :1] > 100, math.nan, 0.0)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Identity(), nn.Linear(4, 4), Poisoned(), nn.Linear(4, 1)]


def sgd(named: list) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.01)


def make(modules: list[nn.Module], schedule: str = "1f1b", **options) -> twobw.Pipeline:
    return twobw.Pipeline(
        modules,
        nn.functional.mse_loss,
        sgd,
        schedule,
        **({"num_microbatches": 2, "pp": 2, "split": [2, 2], "timeout": 30} | options),
    )


def train_one(pipeline: twobw.Pipeline) -> None:
    pipeline.train_step(*batches(bad=0)[1])
    pipeline.drain()


def batches(bad: int, sample: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Six of 4 samples; one has a sample that is poisoned behind the second layer."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(4, 4, generator=generator) for _ in range(6)]
    data[bad][sample] = 1e6
    return [(x, x.sum(1, keepdim=True).clamp(-9, 9)) for x in data]


@pytest.mark.parametrize("recompute", ["none", "layer", "stage"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_the_first_layer_is_named(schedule: str, recompute: str) -> None:
    with make(layers(), schedule, recompute=recompute) as pipeline:
        with torch.no_grad():  # so that the second layer surely gives more than 100
            pipeline._ranks[0]._stage.layers[1].weight.fill_(1.0)
        assert pipeline.first_non_finite() is None
        results = [pipeline.train_step(*pair) for pair in batches(bad=3)]
        pipeline.drain()
        found = pipeline.first_non_finite()
    version = 2 if schedule == "2bw" else 3
    assert found == NonFinite(3, microbatch=1, layer=2, stage=1, replica=0, version=version)
    assert [math.isfinite(float(result.loss)) for result in results[:4]] == [True] * 3 + [False]


def test_of_replicas_the_first_counts() -> None:
    with make(layers(), dp=2, num_microbatches=1) as pipeline:
        for rank in pipeline._ranks[:2]:
            with torch.no_grad():
                rank._stage.layers[1].weight.fill_(1.0)
        for pair in batches(bad=1, sample=3):
            pipeline.train_step(*pair)
        assert pipeline.first_non_finite() == NonFinite(1, 1, 2, stage=1, replica=1, version=1)


def test_a_loss_that_is_not_finite_comes_after_the_last_layer() -> None:
    with twobw.Pipeline(
        layers(), lambda output, _: (output * 0).log().mean(), sgd, pp=2, num_microbatches=1
    ) as pipeline:
        pipeline.train_step(*batches(bad=0)[1])
        found = pipeline.first_non_finite()
    assert found is not None
    assert (found.layer, found.stage) == (4, 1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_batch_whose_gradient_is_not_finite_is_as_if_it_were_not_there(schedule: str) -> None:
    modules = layers()
    with torch.no_grad():
        modules[1].weight.fill_(1.0)
    expected = nn.Sequential(*copy.deepcopy(modules))
    optimizer = sgd(list(expected.named_parameters()))
    for x, y in batches(bad=3)[:3] + batches(bad=3)[4:]:
        optimizer.zero_grad()
        for part in (slice(0, 2), slice(2, 4)):
            (nn.functional.mse_loss(expected(x[part]), y[part]) / 2).backward()
        optimizer.step()
    with make(modules, schedule, skip_non_finite=True) as pipeline:
        results = [pipeline.train_step(*pair) for pair in batches(bad=3)]
        state = pipeline.full_state_dict()
    assert [result.is_skipped for result in results] == [False] * 3 + [True] + [False] * 2
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_skipping_is_refused_where_updates_cannot_wait() -> None:
    with pytest.raises(ValueError, match="skip_non_finite does not go with schedule = 'weight-st"):
        make(layers(), "weight-stashing", skip_non_finite=True)


@pytest.mark.parametrize(
    ("split", "giver"), [([2, 2], "layer 1, on the stage before"), ([1, 3], "layer 1 (Linear)")]
)
def test_a_layer_that_cannot_take_what_it_is_given_is_named_with_its_giver(
    split: list[int], giver: str
) -> None:
    modules = [nn.Identity(), nn.Linear(4, 4), nn.Linear(3, 4), nn.Linear(4, 1)]
    wrong = pytest.raises(RuntimeError, match="shapes cannot be multiplied")
    with make(modules, split=split) as pipeline, wrong as caught:
        train_one(pipeline)
    assert caught.value.__notes__[0] == (
        f"in layer 2 (Linear), which was given float32[2, 4] by {giver}"
    )
