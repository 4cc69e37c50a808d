"""What is written of a run, and what is said when it has ended."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.config.files import write
from twobw.config import Config, load_config
from twobw.core.timeline import Timeline
from twobw.models.whole import whole_model
from twobw.runtime.results import StageMetrics
from twobw.training.metrics import MetricsWriter, StageSummary, Summary
from twobw.training.report import Outcome, RunReport, describe
from twobw.training.resuming import Start
from twobw.training.run_folder import failure_of

SUMMARY = Summary(
    schedule="2bw",
    num_batches=1200,
    samples=4800,
    tokens=614_400,
    num_skipped=0,
    is_stopped_early=False,
    failure=None,
    validation_loss_start=5.5,
    validation_loss_end=2.25,
    validation_loss_best=None,
    best_num_batches=None,
    validation_accuracy_start=None,
    validation_accuracy_end=None,
    train_loss_end=2.0,
    loss_unit="nats a byte",
    tokens_per_second=8192.0,
    train_seconds=75.0,
    stages=(StageSummary(3, 0.955, 2, 300 * 2**20), StageSummary(3, 0.9, 1, 2**30)),
    prompt="def ",
    sample="def f(x):\n    return x",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``runs/demo`` with weights."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/demo")
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").touch()
    return folder


def test_the_last_lines_of_a_run(folder: Path) -> None:
    assert describe(SUMMARY, folder, ".venv/bin/twobw").splitlines() == [
        "1,200 batches, 614,400 tokens in 1:15: 8,192 tokens/s",
        "validation loss 5.5000 at the start, 2.2500 at the end, in nats a byte",
        "stage 0: 3 layers, busy 95.5%, 2 weight versions held, peak 300 MiB",
        "stage 1: 3 layers, busy 90.0%, 1 weight version held, peak 1,024 MiB",
        "a sample after 'def ':",
        "  | def f(x):",
        "  |     return x",
        "timeline  runs/demo/timeline.json (open it in ui.perfetto.dev)",
        "report    .venv/bin/twobw report runs/demo (writes one page on all of it)",
        "weights   runs/demo/weights.safetensors "
        "(.venv/bin/twobw sample runs/demo --prompt 'def ')",
    ]


def test_the_command_can_be_typed_whatever_the_names_are(folder: Path) -> None:
    folder = folder.rename("my run")
    lines = describe(replace(SUMMARY, prompt="it's "), folder, "twobw").splitlines()
    assert lines[-1].endswith("""(twobw sample 'my run' --prompt 'it'"'"'s ')""")


def test_a_run_that_writes_no_text_names_no_command(folder: Path) -> None:
    summary = replace(
        SUMMARY, prompt="", validation_accuracy_start=0.25, validation_accuracy_end=0.5
    )
    lines = describe(summary, folder, "twobw").splitlines()
    assert lines[2] == "validation accuracy 25.0% at the start, 50.0% at the end"
    assert lines[-1] == "weights   runs/demo/weights.safetensors"


def test_figures_that_are_not_finite_are_not_left_out(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    summary = replace(SUMMARY, prompt="", validation_loss_end=None)
    lines = describe(summary, folder, "twobw").splitlines()
    assert lines[1] == "validation loss 5.5000 at the start, not finite at the end, in nats a byte"
    assert lines[-1] == "weights   not saved: not finite"


class Lines(list[str]):
    """A display that keeps what it is to show."""

    def note(self, text: str) -> None:
        self.extend(text.splitlines())

    def update(self, row: object) -> None:
        pass

    def log(self, row: object) -> None:
        pass

    def close(self) -> None:
        pass


def reported(
    config: Config, folder: Path, losses: Sequence[float], skipped: Sequence[int], weight: float
) -> Lines:
    """What is shown of a run with these losses and skipped batches, whose weights are filled."""
    lines = Lines()
    weights = whole_model(config.model.size()).state_dict()
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        report = RunReport(config, folder, "twobw", metrics, lines)
        report.begin(SimpleNamespace(description="some text"), [4], Start())  # type: ignore[arg-type]
        for batch, loss in enumerate(losses):
            stages = [StageMetrics(0.5, 2, 2**20)]
            result = SimpleNamespace(
                batch=batch,
                loss=loss,
                grad_norm=None,
                is_skipped=batch in skipped,
                stage_metrics=lambda stages=stages: stages,
            )
            report.add(result, seconds=0.5)  # type: ignore[arg-type]
        for tensor in weights.values():
            tensor.fill_(weight)
        report.finish(Outcome(1.0, weights, Timeline((), "measured"), None))
    return lines


def test_a_run_that_diverges_leaves_why_and_no_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "weights.safetensors").unlink()
    lines = reported(load_config(write(tmp_path)), folder, [5.5, math.nan, math.nan], [], math.nan)
    failure = failure_of(folder)
    assert failure is not None
    assert failure.startswith("the loss is nan at step 2; try a lower optimizer.lr (now 0.01)")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["num_batches"], summary["is_stopped_early"]) == (3, True)
    assert (summary["train_loss_end"], summary["sample"]) == (None, "")
    assert lines[-1] == "weights   not saved: not finite"
    assert not (folder / "weights.safetensors").exists()


def test_updates_that_fp16_skips_are_counted_and_no_failure(folder: Path, tmp_path: Path) -> None:
    config = load_config(write(tmp_path, training={"precision": "fp16"}))
    reported(config, folder, [5.5, math.inf, 5.4, 5.3, 5.2], [1, 3], 0.5)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["num_skipped"] for row in rows] == [0, 1, 1, 2, 2]
    assert [row["loss"] for row in rows] == [5.5, None, 5.4, 5.3, 5.2]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["num_skipped"], summary["is_stopped_early"]) == (2, False)
    assert failure_of(folder) is None


@pytest.mark.parametrize(("precision", "known"), [("fp32", False), ("bf16", True)])
def test_mfu_is_of_the_16_bit_peak_and_so_of_16_bit_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, known: bool
) -> None:
    monkeypatch.setattr("twobw.training.report.peak_flops", lambda device: 1e12)
    config = load_config(write(tmp_path, training={"precision": precision}))
    reported(config, folder, [5.5], [], 0.5)
    (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert (row["mfu"] is not None) == known
    assert row["mfu"] is None or row["mfu"] == pytest.approx(row["tflops"])


def test_a_measured_update_lag_is_told(folder: Path, tmp_path: Path) -> None:
    lines = Lines()
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        report = RunReport(load_config(write(tmp_path)), folder, "twobw", metrics, lines)
        report.switched(8, 1)
    assert lines == ["2bw-fresh from step 9: update_lag is 1 microbatch, as measured"]
