"""The same over gloo processes as in one process, to the bit where nothing is summed between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.programs.cases import OF_FOUR, OF_THREE, SEED, sum_and_weight
from tests.runtime.reference import (
    stale_first,
    train,
    train_delayed,
    train_plain,
    train_stashed,
)
from twobw.runtime.layers import choose_split

ROOT = Path(__file__).parents[2]


def launch(num_processes: int, which: str, out: Path) -> dict:
    """All cases run in one launch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_processes)]
    command += ["-m", "tests.dist.programs.exactness", which, str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return launch(3, "OF_THREE", tmp_path_factory.mktemp("three") / "outcomes.pt")


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return launch(4, "OF_FOUR", tmp_path_factory.mktemp("four") / "outcomes.pt")


@pytest.mark.parametrize("name", OF_THREE)
def test_one_pipeline_equals_the_reference(of_three: dict, name: str) -> None:
    case, outcome = OF_THREE[name], of_three[name]
    model = nn.Sequential(*case.layers())
    arguments = (model, case.loss_fn, case.optimizer, case.data(), case.num_microbatches)
    if case.schedule == "2bw":
        losses = train_delayed(*arguments, SEED)
    elif case.schedule == "weight-stashing":
        losses = train_stashed(*arguments, choose_split(case.layers(), None, 3), SEED)
    elif case.schedule in ("2bw-fresh", "paci"):
        delay = stale_first(choose_split(case.layers(), None, 3), case.num_microbatches)
        is_paci = case.schedule == "paci"
        losses = train(*arguments, SEED, delay=delay, backward_on_newest=is_paci, **case.options)
    else:
        losses = train_plain(*arguments, SEED)
    assert list(outcome["state"]) == list(model.state_dict())
    for parameter, tensor in model.state_dict().items():
        assert torch.equal(outcome["state"][parameter], tensor), parameter
    assert outcome["losses"] == losses
    inputs, targets = case.data()[0]
    with torch.no_grad():
        expected = case.loss_fn(model.eval()(inputs), targets).item()
    assert outcome["evaluated"] == pytest.approx(expected, rel=1e-5)  # summed in another order
    assert outcome["ranks"] == [0, 1, 2]
    assert outcome["metrics"] == [3] * len(losses)


def weighted_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total, weight = sum_and_weight(output, target)
    return total / weight


@pytest.mark.parametrize("name", OF_FOUR)
def test_replicas_and_ties_equal_the_reference(of_four: dict, name: str) -> None:
    """Gradients are summed over ranks, in another order than in one process."""
    case, outcome = OF_FOUR[name], of_four[name]
    model = nn.Sequential(*case.layers())
    m, loss_fn = case.num_microbatches * case.dp, case.loss_fn
    if loss_fn is sum_and_weight:
        m, loss_fn = 1, weighted_mean
    train = train_delayed if case.schedule == "2bw" else train_plain
    norms: list[float] = []
    losses = train(
        model,
        loss_fn,
        case.optimizer,
        case.data(),
        m,
        SEED,
        max_grad_norm=case.options.get("max_grad_norm"),
        norms=norms,
    )
    for parameter, tensor in model.state_dict().items():
        torch.testing.assert_close(outcome["state"][parameter], tensor, rtol=1e-4, atol=1e-6)
    assert outcome["losses"] == pytest.approx(losses, rel=1e-5)
    assert outcome["ranks"] == [0, 1, 2, 3]
    if case.dp == 2:
        neighbours = case.options.get("placement", "replicas")
        assert outcome["stages"] == {"replicas": [0, 0, 1, 1], "pipelines": [0, 1, 0, 1]}[neighbours]
    if norms:
        assert outcome["norms"] == pytest.approx(norms, rel=1e-5)
