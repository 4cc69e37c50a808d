import io
import subprocess
import sys

import pytest
from rich.console import Console

from twobw.training.metrics import BatchRow, StageRow
from twobw.training.progress import (
    LiveProgress,
    RemainingTime,
    duration,
    figures,
    make_progress,
)


def row(
    batch: int, grad_norm: float | None = 0.75, mfu: float | None = None, num_skipped: int = 0
) -> BatchRow:
    stages = (StageRow(0.96, 2, 2**28), StageRow(0.9, 2, 2**29))
    return BatchRow(
        batch,
        loss=2.5,
        grad_norm=grad_norm,
        lr=0.001,
        tokens_per_second=24691.0,
        tflops=0.0512,
        mfu=mfu,
        samples=16 * (batch + 1),
        num_skipped=num_skipped,
        stages=stages,
    )


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str, /) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (75.2, "1:15"), (3700, "1:01:40"), (59.7, "1:00")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_remaining_time_leaves_the_first_batch_out() -> None:
    times = iter([100.0, 102.0, 104.0])
    remaining = RemainingTime(10, now=lambda: next(times))
    assert remaining.after(0) == "? left"
    assert remaining.after(1) == "0:16 left"
    assert remaining.after(2) == "0:14 left"


def test_the_line_of_a_batch_has_torchtitans_form() -> None:
    assert figures(row(0), num_ranks=2) == (
        "loss: 2.5000  grad_norm: 0.7500  lr: 1.00e-03  memory: 0.50GiB  tps: 12,346  "
        "tflops: 0.0512  mfu: n/a  bubble: 4%/10%"
    )
    assert "grad_norm" not in figures(row(0, grad_norm=None), num_ranks=2)
    assert "  grad_norm: 0.7500  skipped: 3  lr: " in figures(row(0, num_skipped=3), num_ranks=2)
    assert "  mfu: 41.7%  " in figures(row(0, mfu=0.417), num_ranks=2)


def test_piped_output_is_plain_lines() -> None:
    stream = io.StringIO()
    progress = make_progress(stream, num_batches=7, num_ranks=2)
    progress.note("hello")
    for batch in range(7):
        progress.update(row(batch))
        if batch in (0, 3, 6):
            progress.log(row(batch))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["step:", n] for n in "147"]
    assert lines[0] == "hello"
    assert figures(row(0), num_ranks=2) in lines[1]
    assert lines[-1].endswith("0:00 left")
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_shows_the_last_batch() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=150)
    progress = LiveProgress(console, 7, RemainingTime(7), num_ranks=2)
    progress.note("hello")
    for batch in range(7):
        progress.update(row(batch))
        progress.log(row(batch))
    progress.close()
    shown = stream.getvalue()
    progress.close()
    assert stream.getvalue() == shown  # a second time does nothing
    assert "hello" in shown
    for part in ("step 7/7", figures(row(6), num_ranks=2), "0:00 left"):
        assert part in shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_reader_that_leaves_does_not_end_the_run(is_terminal: bool) -> None:
    progress = make_progress(Gone(is_terminal), num_batches=7, num_ranks=2)
    progress.note("hello")
    progress.update(row(0))
    progress.log(row(0))
    progress.close()


def test_a_python_whose_output_nobody_reads_ends_well() -> None:
    code = """
import sys
from twobw.training.progress import make_progress
progress = make_progress(sys.stdout, 7, 2)
for _ in range(10_000):
    progress.note("hello")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 0
