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
    make_progress,
)


def row(batch: int) -> BatchRow:
    stages = (StageRow(0.96, 2, 100), StageRow(0.9, 2, 200))
    return BatchRow(batch, 2.5, 0.001, 1234.0, 16 * (batch + 1), stages)


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


def test_piped_output_is_plain_lines() -> None:
    stream = io.StringIO()
    progress = make_progress(stream, num_batches=7, log_every=3)
    progress.note("hello")
    for batch in range(7):
        progress.update(row(batch))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["1/7", "3/7", "6/7", "7/7"]
    assert lines[0] == "hello"
    assert "loss 2.5000" in lines[1]
    assert "1,234 tokens/s" in lines[1]
    assert "bubble 4% 10%" in lines[1]
    assert lines[-1].endswith("0:00 left")
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_shows_the_last_batch() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    progress = LiveProgress(console, 7, RemainingTime(7))
    progress.note("hello")
    for batch in range(7):
        progress.update(row(batch))
    progress.close()
    shown = stream.getvalue()
    progress.close()
    assert stream.getvalue() == shown  # a second time does nothing
    assert "hello" in shown
    for part in ("batch 7/7", "loss 2.5000", "1,234 tokens/s", "4% 10%", "0:00 left"):
        assert part in shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_reader_that_leaves_does_not_end_the_run(is_terminal: bool) -> None:
    progress = make_progress(Gone(is_terminal), num_batches=7, log_every=1)
    progress.note("hello")
    progress.update(row(0))
    progress.close()


def test_a_python_whose_output_nobody_reads_ends_well() -> None:
    code = """
import sys
from twobw.training.progress import make_progress
progress = make_progress(sys.stdout, 7, 1)
for _ in range(10_000):
    progress.note("hello")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 0
