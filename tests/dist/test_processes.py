"""The same over gloo processes as in one process, to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.programs.cases import CASES, SEED
from tests.runtime.reference import train_delayed, train_plain, train_stashed
from twobw.runtime.layers import choose_split

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All cases run in one launch of three processes."""
    out = tmp_path_factory.mktemp("exactness") / "outcomes.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", "-m", "tests.dist.programs.exactness", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(outcomes: dict, name: str) -> None:
    case, outcome = CASES[name], outcomes[name]
    model = nn.Sequential(*case.layers())
    arguments = (model, case.loss_fn, case.optimizer, case.data(), case.num_microbatches)
    if case.schedule == "2bw":
        losses = train_delayed(*arguments, SEED)
    elif case.schedule == "weight-stashing":
        losses = train_stashed(*arguments, choose_split(case.layers(), None, 3), SEED)
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
