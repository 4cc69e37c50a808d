"""A run of two stages with two replicas each, and all that a real run needs, in one launch."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.dist.commands import Ended, batches_of, metrics_of, started
from twobw.cli import main
from twobw.config import Config, read_resolved_config
from twobw.models.gpt import gpt_layers, loss_fn
from twobw.runtime.layers import build_layers
from twobw.training.data import TextData
from twobw.training.optimizer import lr_at
from twobw.training.weights import load_weights

SETTINGS = {
    "model.tied": "true",
    "parallel.dp": "2",
    "parallel.num_microbatches": "2",
    "parallel.shard_optimizer": "true",
    "parallel.check_replicas_every": "5",
    "optimizer.name": "muon",
    "optimizer.weight_decay": "0.01",
    "optimizer.decay": "wsd",
    "training.global_batch_size": "9",  # 5 samples for one replica, 4 for the other
    "training.precision": "bf16",
    "training.recompute": "attention",
    "training.max_grad_norm": "0.5",
    "training.evaluate_every": "4",
    "training.evaluation_batch_size": "7",
    "training.evaluation_microbatches": "3",
    "run.tensorboard": "true",
}


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("replicas")
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    with started(folder, "twobw", "train", "tiny.toml", *settings) as command:
        return folder / "runs/tiny", command.wait()


def data_of(run: Path, config: Config) -> TextData:
    return TextData(
        [run.parents[1] / "text.txt"],
        sequence_length=config.model.sequence_length,
        validation_fraction=config.data.validation_fraction,
        seed=config.training.seed,
    )


@torch.no_grad()
def validation_loss(run: Path, model: nn.Module) -> float:
    """In one process and in fp32: the run's own differ by what 16 bits cost."""
    config = read_resolved_config(run / "config.toml")
    batches = data_of(run, config).validation_batches(2, 7)
    return sum(loss_fn(model(x), y).item() for x, y in batches) / 2


def test_it_ends_well_and_says_how_it_goes(ended_run: tuple[Path, Ended]) -> None:
    run, ended = ended_run
    assert (ended.code, ended.err) == (0, "")
    assert [(run / f"rank{rank}.log").read_text() for rank in range(4)] == [""] * 4
    steps = [line for line in ended.out.splitlines() if line.startswith("step:")]
    form = (
        r"step: \d+  loss: \d\.\d{4}  grad_norm: \d+\.\d{4}  lr: \S+  memory: \d\.\d\dGiB  "
        r"tps: [\d,]+  tflops: \S+  mfu: (n/a|\S+%)  bubble: \d+%/\d+%  \S+ left"
    )
    assert all(re.fullmatch(form, line) for line in steps), steps
    assert [line.split()[1] for line in steps] == ["1", "5", "10", "12"]
    validations = [line for line in ended.out.splitlines() if line.startswith("validate step:")]
    assert [line.split()[2] for line in validations] == ["0", "4", "8", "12"]
    assert "2 stages of [2, 2] layers x 2 replicas" in ended.out


def test_every_batch_has_its_norm_and_its_rate(ended_run: tuple[Path, Ended]) -> None:
    run, _ = ended_run
    config = read_resolved_config(run / "config.toml")
    rows = batches_of(run)
    assert [row["batch"] for row in rows] == list(range(12))
    assert [row["samples"] for row in rows] == [9 * (n + 1) for n in range(12)]
    assert [row["lr"] for row in rows] == [lr_at(n, config.optimizer, 12) for n in range(12)]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["tflops"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 1


def test_validation_is_of_the_weights_that_were_kept(ended_run: tuple[Path, Ended]) -> None:
    run, ended = ended_run
    rows = [row for row in metrics_of(run) if "validation_loss" in row]
    assert [row["num_batches"] for row in rows] == [0, 4, 8, 12]
    for row in rows:
        assert row["validation_perplexity"] == pytest.approx(math.exp(row["validation_loss"]))
        assert row["samples"] == 9 * row["num_batches"]
    best = min(rows[1:], key=lambda row: row["validation_loss"])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["validation_loss_start"] == rows[0]["validation_loss"]
    assert summary["validation_loss_end"] == rows[-1]["validation_loss"]
    assert summary["validation_loss_best"] == best["validation_loss"]
    assert summary["best_num_batches"] == best["num_batches"]
    assert f"best      {Path('runs/tiny/best.safetensors')}" in ended.out
    config = read_resolved_config(run / "config.toml").model.size()
    for file, row in [("weights.safetensors", rows[-1]), ("best.safetensors", best)]:
        loss = validation_loss(run, load_weights(config, run / file).eval())
        assert loss == pytest.approx(row["validation_loss"], abs=0.02)


def test_the_tied_weight_is_stored_once_and_can_be_sampled(
    ended_run: tuple[Path, Ended], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = ended_run
    with safe_open(run / "weights.safetensors", "pt") as file:
        assert "0.token.weight" in file.keys()  # noqa: SIM118
        assert "3.logits.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"3.logits.weight": "0.token.weight"}
    with pytest.raises(SystemExit) as code:
        main(["sample", str(run), "--prompt", "7 + ", "--tokens", "5"])
    assert code.value.code in (0, None)
    assert capsys.readouterr().out.startswith("7 + ")


def test_the_timeline_has_both_replicas(ended_run: tuple[Path, Ended]) -> None:
    run, _ = ended_run
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}


def test_tensorboard_has_a_file(ended_run: tuple[Path, Ended]) -> None:
    run, _ = ended_run
    assert [path.name.split(".")[:3] for path in (run / "tensorboard").iterdir()] == [
        ["events", "out", "tfevents"]
    ]


def test_two_replicas_are_plain_training(tmp_path: Path) -> None:
    """Beside one process: the same samples in the same order, rates, decay and clipping."""
    settings = {
        "parallel.pp": "1",
        "parallel.dp": "2",
        "parallel.schedule": "1f1b",
        "parallel.num_microbatches": "3",
        "optimizer.name": "sgd",
        "optimizer.lr": "0.3",
        "optimizer.weight_decay": "0.1",
        "optimizer.warmup_batches": "4",
        "training.global_batch_size": "7",
        "training.max_grad_norm": "0.5",
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    with started(tmp_path, "twobw", "train", "tiny.toml", *arguments) as command:
        assert command.wait().code == 0
    run = tmp_path / "runs/tiny"
    config = read_resolved_config(run / "config.toml")
    model = nn.Sequential(*build_layers(gpt_layers(config.model.size()), 0, config.training.seed))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    data = data_of(run, config)
    for row in batches_of(run):
        inputs, targets = data.batch(7 * row["batch"], 7)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
        optimizer.zero_grad()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    trained = load_weights(config.model.size(), run / "weights.safetensors")
    torch.testing.assert_close(trained.state_dict(), model.state_dict(), rtol=1e-3, atol=1e-5)
