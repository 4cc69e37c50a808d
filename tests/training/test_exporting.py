"""Weights out of a run and into one."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import twobw
from tests.config.files import write
from twobw.cli import main
from twobw.config import load_config, read_resolved_config
from twobw.models.whole import model_layers, model_loss
from twobw.training.initial_weights import start_from
from twobw.training.resuming import open_run
from twobw.training.weights import load_weights, save_weights

TIED = {"name": "gpt-tiny", "tied": True}


def run_with_checkpoint(folder: Path) -> tuple[Path, nn.Sequential]:
    """A run that was killed after a batch, and its model then."""
    config = load_config(write(folder, model=TIED, run={"folder": str(folder / "runs")}))
    run = open_run(config, {}, None).folder
    size = config.model.size()
    modules = [x if isinstance(x, nn.Module) else x() for x in model_layers(size)]
    with twobw.Pipeline(modules, model_loss(size), torch.optim.AdamW, pp=2) as pipeline:
        tokens = torch.arange(4 * 32).reshape(4, 32)
        pipeline.train_step(tokens, tokens)
        pipeline.save(run / "checkpoints")
        state = pipeline.full_state_dict()
    assert state is not None
    save_weights(state, size, folder / "expected.safetensors")
    return run, load_weights(size, folder / "expected.safetensors")


def call(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(tokens)
    assert ended.value.code in (0, None)
    return capsys.readouterr().out.strip()


def test_the_newest_weights_go_out_and_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = run_with_checkpoint(tmp_path)
    out = Path(call(capsys, "export", str(run)))
    assert out == run / "export"
    weights = load_file(out / "model.safetensors")
    state = model.state_dict()
    assert {*state} - {*weights} == {"3.logits.weight"}  # tied
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    settings = json.loads((out / "config.json").read_text())
    assert (settings["name"], settings["width"], settings["tied"]) == ("gpt-tiny", 32, True)

    config = write(tmp_path, "second.toml", model=TIED)
    arguments = [str(out / "model.safetensors"), str(config), "--run.folder", str(tmp_path)]
    said = call(capsys, "import", *arguments)
    second = tmp_path / "second"
    assert said.endswith(f" train --resume {second}")
    model_settings = read_resolved_config(second / "config.toml").model
    assert Path(model_settings.init_from).parent == second
    layers = start_from(model_layers(model_settings.size()), model_settings.init_from)
    first = layers[0] if isinstance(layers[0], nn.Module) else layers[0]()
    assert torch.equal(first.state_dict()["token.weight"], state["0.token.weight"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of loading
def test_for_torch_distributed_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = run_with_checkpoint(tmp_path)
    out = call(capsys, "export", str(run), "--format", "dcp", "--out", str(tmp_path / "dcp"))
    state = {n: torch.zeros_like(t) for n, t in model.named_parameters()}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.named_parameters())


def test_a_run_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(write(tmp_path, run={"folder": str(tmp_path / "runs")}))
    run = open_run(config, {}, None).folder
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run)])
    assert ended.value.code == 2
    assert "there is no checkpoint in" in capsys.readouterr().err


def test_weights_that_do_not_fit_make_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = run_with_checkpoint(tmp_path)
    call(capsys, "export", str(run))
    config = write(tmp_path, "wider.toml", model={**TIED, "width": 64})
    folder = tmp_path / "more"
    with pytest.raises(SystemExit) as ended:
        main(["import", f"{run}/export/model.safetensors", str(config), f"--run.folder={folder}"])
    assert ended.value.code == 2
    assert "has weights of other shapes" in capsys.readouterr().err
    assert not folder.exists()
