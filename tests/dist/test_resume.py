"""Runs that are stopped, killed or restarted, and go on."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.commands import batches_of, metrics_of, started
from tests.dist.test_command_line import LINUX

SETTINGS = ("--training.num_batches", "24", "--checkpoint.every", "4")
SETTINGS += ("--training.evaluate_every", "8", "--optimizer.warmup_batches", "8")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with started(folder, "twobw", "train", "tiny.toml", *SETTINGS) as command:
        assert command.wait().code == 0
    return folder / "runs/tiny"


def assert_same_run(run: Path, expected: Path) -> None:
    """Losses and weights to the bit, each batch and evaluation once, in order."""
    names = ("batch", "loss", "lr", "samples", "num_batches", "validation_loss")
    rows, others = ([[r.get(n) for n in names] for r in metrics_of(p)] for p in (run, expected))
    assert rows == others
    weights, others = (load_file(p / "weights.safetensors") for p in (run, expected))
    assert all(torch.equal(weights[name], tensor) for name, tensor in others.items())
    summary, other = (json.loads((p / "summary.json").read_text()) for p in (run, expected))
    for name in ("tokens", "validation_loss_start", "validation_loss_best", "best_num_batches"):
        assert summary[name] == other[name]


@LINUX
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path, uninterrupted: Path) -> None:
    with started(tmp_path, "twobw", "train", "tiny.toml", *SETTINGS) as command:
        command.wait_for_batches(9)
        os.kill(command.ranks()[1], signal.SIGKILL)
        assert command.wait().code == 1
    run = tmp_path / "runs/tiny"
    assert len(batches_of(run)) < 24
    with started(tmp_path, "twobw", "train", "--resume", "runs/tiny") as command:
        ended = command.wait()
    assert (ended.code, ended.err) == (0, "")
    assert "goes on after step " in ended.out
    assert_same_run(run, uninterrupted)
    steps = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert steps == ["step-00000020", "step-00000024"]


# Loaded by every Python that has its folder on the path.
FAILS_ONCE = """
import os
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    from twobw.models.gpt import Head
    forward, calls = Head.forward, iter(range(60))
    def failing(self, hidden):
        if next(calls, None) is None:
            raise ValueError("this layer fails")
        return forward(self, hidden)
    Head.forward = failing
"""


@pytest.mark.timeout(300)  # five processes import torch twice
def test_a_restarted_run_goes_on_by_itself(tmp_path: Path, uninterrupted: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILS_ONCE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    shutil.copytree(uninterrupted, tmp_path / "runs/tiny")  # a run of the same name
    with started(
        tmp_path,
        *[*torchrun, "--standalone", "-m", "twobw", "train", "tiny.toml", *SETTINGS],
        env={"PYTHONPATH": path},
    ) as command:
        ended = command.wait(240)
    assert "this layer fails" in ended.err
    assert ended.code == 0
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == ["tiny", "tiny-2"]
    assert_same_run(tmp_path / "runs/tiny-2", uninterrupted)


def test_a_stopped_run_goes_on_under_another_layout(tmp_path: Path, uninterrupted: Path) -> None:
    settings = [*SETTINGS, "--checkpoint.every", "0"]
    with started(tmp_path, "twobw", "train", "tiny.toml", *settings) as command:
        command.wait_for_batches(3)
        command.process.send_signal(signal.SIGINT)
        ended = command.wait()
    assert ended.code == 0
    assert ended.err.splitlines()[-1].endswith(" -m twobw train --resume runs/tiny")
    run = tmp_path / "runs/tiny"
    done = len(batches_of(run))
    layout = ["--parallel.pp", "2", "--parallel.dp", "2", "--parallel.num_microbatches", "3"]
    layout += ["--parallel.schedule", "1f1b", "--parallel.shard_optimizer", "true"]
    layout += ["--training.global_batch_size", "12"]
    with started(tmp_path, "twobw", "train", "--resume", "runs/tiny", *layout) as command:
        ended = command.wait()
    assert (ended.code, ended.err) == (0, "")
    rows = batches_of(run)
    assert [row["batch"] for row in rows] == list(range(24))
    sizes = [8] * done + [12] * (24 - done)
    assert [row["samples"] for row in rows] == [sum(sizes[: k + 1]) for k in range(24)]
    first = [row["loss"] for row in batches_of(uninterrupted)[:done]]
    assert [row["loss"] for row in rows[:done]] == first
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert "dp = 2" in (run / "config.toml").read_text()
