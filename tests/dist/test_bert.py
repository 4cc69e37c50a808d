"""Pre-training a BERT and telling packages apart from its weights, with real ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.commands import batches_of, metrics_of, started
from twobw.cli import main
from twobw.training.masking import MASK


def write_packages(folder: Path) -> None:
    for name in ("apple", "berry", "cherry"):
        (folder / name).mkdir(parents=True)
        for file in range(20):
            text = "".join(f"{name} {file * line} of {line}\n" for line in range(50))
            (folder / name / f"{file}.txt").write_text(text)


def test_pre_training_then_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_packages(tmp_path / "packages")
    common = ["--data.paths", "packages", "--data.validation_fraction", "0.3"]
    common += ["--model.name", "bert-tiny", "--training.evaluate_every", "10"]
    pre_training = ["--run.name", "masked", "--training.num_batches", "20"]
    with started(tmp_path, "twobw", "train", "tiny.toml", *common, *pre_training) as command:
        ended = command.wait()
    assert (ended.code, ended.err) == (0, "")
    masked = tmp_path / "runs/masked"
    summary = json.loads((masked / "summary.json").read_text())
    assert summary["validation_loss_end"] < summary["validation_loss_start"] - 1
    assert summary["loss_unit"] == "nats a masked byte"
    assert (summary["prompt"], summary["sample"], summary["validation_accuracy_end"]) == (
        "",
        "",
        None,
    )
    assert "twobw sample" not in ended.out

    classes = ["--run.name", "classes", "--model.num_classes", "3", "--parallel.dp", "2"]
    classes += ["--model.init_from", "runs/masked/weights.safetensors"]
    classes += ["--data.samples_per_class", "40", "--training.num_batches", "30"]
    with started(tmp_path, "twobw", "train", "tiny.toml", *common, *classes) as command:
        ended = command.wait()
    assert (ended.code, ended.err) == (0, "")
    run = tmp_path / "runs/classes"
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["validation_accuracy_start"] < 0.8
    assert summary["validation_accuracy_end"] > 0.5
    assert summary["loss_unit"] == "nats a snippet"
    assert f"{summary['validation_accuracy_end']:.1%} at the end" in ended.out
    validations = [row for row in metrics_of(run) if "validation_accuracy" in row]
    assert [row["num_batches"] for row in validations] == [0, 10, 20, 30]
    assert validations[-1]["validation_accuracy"] == summary["validation_accuracy_end"]
    assert len(batches_of(run)) == 30
    weights = load_file(run / "weights.safetensors")
    assert weights["3.classes.weight"].shape == (3, 32)
    # Nothing is masked here, so the mask's vector is still what pre-training has made of it.
    before = load_file(masked / "weights.safetensors")["0.token.weight"]
    assert torch.equal(weights["0.token.weight"][MASK], before[MASK])
    assert not torch.equal(weights["0.token.weight"], before)

    with pytest.raises(SystemExit) as caught:
        main(["sample", str(run)])
    assert caught.value.code == 2
    assert "is a run of a BERT, which writes no text" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_refused_before_any_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights").write_text("nothing of the kind")
    Path("one.toml").write_text(
        "[model]\nname = 'bert-tiny'\ninit_from = 'weights'\n[optimizer]\nlr = 1\n"
        "[training]\nnum_batches = 1\nglobal_batch_size = 4\n"
    )
    with pytest.raises(SystemExit) as caught:
        main(["train", "one.toml"])
    assert caught.value.code == 2
    assert "model.init_from = weights: 1 problem\n  cannot be read" in capsys.readouterr().err
    assert not Path("runs").exists()
