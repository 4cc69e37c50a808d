"""What is said when a run has ended."""

from dataclasses import replace
from pathlib import Path

from twobw.training.metrics import StageSummary, Summary
from twobw.training.report import describe

SUMMARY = Summary(
    schedule="2bw",
    num_batches=1200,
    samples=4800,
    tokens=614_400,
    is_stopped_early=False,
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


def test_the_last_lines_of_a_run() -> None:
    assert describe(SUMMARY, Path("runs/demo"), ".venv/bin/twobw").splitlines() == [
        "1,200 batches, 614,400 tokens in 1:15: 8,192 tokens/s",
        "validation loss 5.5000 at the start, 2.2500 at the end, in nats a byte",
        "stage 0: 3 layers, busy 95.5%, 2 weight versions held, peak 300 MiB",
        "stage 1: 3 layers, busy 90.0%, 1 weight version held, peak 1,024 MiB",
        "a sample after 'def ':",
        "  | def f(x):",
        "  |     return x",
        "timeline  runs/demo/timeline.json (open it in ui.perfetto.dev)",
        "weights   runs/demo/weights.safetensors "
        "(.venv/bin/twobw sample runs/demo --prompt 'def ')",
    ]


def test_the_command_can_be_typed_whatever_the_names_are() -> None:
    lines = describe(replace(SUMMARY, prompt="it's "), Path("my runs/demo"), "twobw").splitlines()
    assert lines[-1].endswith("""(twobw sample 'my runs/demo' --prompt 'it'"'"'s ')""")


def test_a_run_that_writes_no_text_names_no_command() -> None:
    summary = replace(
        SUMMARY, prompt="", validation_accuracy_start=0.25, validation_accuracy_end=0.5
    )
    lines = describe(summary, Path("runs/bert"), "twobw").splitlines()
    assert lines[2] == "validation accuracy 25.0% at the start, 50.0% at the end"
    assert lines[-1] == "weights   runs/bert/weights.safetensors"
