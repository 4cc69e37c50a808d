"""How a run shows itself: a live display on a terminal, plain lines where the output is piped."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Protocol, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from twobw.training.metrics import BatchRow

_REFRESH_S = 0.2


class Progress(Protocol):
    """Where rank 0 shows how the run goes."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def update(self, row: BatchRow) -> None:
        """Take in a batch."""

    def log(self, row: BatchRow) -> None:
        """Take in a batch that is one to show, with the averages since the last that was."""

    def close(self) -> None:
        """Leave the last state on the screen."""


class Output(io.TextIOBase):
    """Text output that goes nowhere once its reader has left: a run outlives ``| head``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_open = True

    def write(self, text: str) -> int:
        """Write all, or nothing if nobody reads."""
        if self._is_open:
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError:
                self._is_open = False
                _discard(self._stream)
        return len(text)

    def isatty(self) -> bool:
        """Whether a person reads."""
        return self._stream.isatty()


def _discard(stream: TextIO) -> None:
    """Let what the stream still holds go nowhere; else writing it at exit fails once more."""
    if stream is sys.stdout:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def make_progress(stream: TextIO, num_batches: int, num_ranks: int) -> Progress:
    """The display that fits ``stream``."""
    clock = RemainingTime(num_batches)
    output = Output(stream)
    if output.isatty():
        console = Console(file=cast("IO[str]", output))
        return LiveProgress(console, num_batches, clock, num_ranks)
    return PlainProgress(output, clock, num_ranks)


class RemainingTime:
    """Guesses the time left from the mean time of the batches since the first it saw."""

    def __init__(self, num_batches: int, now: Callable[[], float] = time.monotonic) -> None:
        self._num_batches = num_batches
        self._now = now
        self._first: tuple[int, float] | None = None

    def after(self, batch: int) -> str:
        """The time left once ``batch`` (0-based) is done, as text."""
        now = self._now()
        if self._first is None:
            self._first = (batch, now)
        first, start = self._first
        if batch == first:
            return "? left"
        mean = (now - start) / (batch - first)
        return f"{duration(mean * (self._num_batches - 1 - batch))} left"


def duration(seconds: float) -> str:
    """``75.2`` as ``1:15``, ``3700`` as ``1:01:40``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def figures(row: BatchRow, num_ranks: int) -> str:
    """A batch's figures in the form that torchtitan's log has: tps, tflops and mfu are of one
    rank, the memory is the largest of any stage, the bubble is the part of the batch that each
    stage was idle. Without clipping there is no grad_norm; once fp16 has skipped updates, their
    number since the start of the run is there."""
    norm = "" if row.grad_norm is None else f"grad_norm: {row.grad_norm:.4f}  "
    skipped = f"skipped: {row.num_skipped}  " if row.num_skipped else ""
    mfu = "n/a" if row.mfu is None else f"{row.mfu:.1%}"
    return (
        f"loss: {row.loss:.4f}  {norm}{skipped}lr: {row.lr:.2e}  "
        f"memory: {row.peak_bytes / 2**30:.2f}GiB  "
        f"tps: {row.tokens_per_second / num_ranks:,.0f}  tflops: {row.tflops:.3g}  mfu: {mfu}  "
        f"bubble: {'/'.join(f'{bubble:.0%}' for bubble in row.bubbles)}"
    )


class PlainProgress:
    """A line for each batch that is one to show."""

    def __init__(self, output: Output, clock: RemainingTime, num_ranks: int) -> None:
        self._output = output
        self._clock = clock
        self._num_ranks = num_ranks

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._output.write(text + "\n")

    def update(self, row: BatchRow) -> None:
        """A line is for `log`."""

    def log(self, row: BatchRow) -> None:
        """Show a batch."""
        left = self._clock.after(row.batch)
        self.note(f"step: {row.batch + 1}  {figures(row, self._num_ranks)}  {left}")

    def close(self) -> None:
        """Nothing is left to do."""


class LiveProgress:
    """A bar and the figures, redrawn in place at most every 0.2 s by the calling thread:
    a thread of its own would take time from the stage."""

    def __init__(
        self, console: Console, num_batches: int, clock: RemainingTime, num_ranks: int
    ) -> None:
        self._console = console
        self._num_batches = num_batches
        self._clock = clock
        self._num_ranks = num_ranks
        self._live = Live(console=console, auto_refresh=False)
        self._drawn = 0.0
        self._row: BatchRow | None = None

    def note(self, text: str) -> None:
        """Show a line of text above the display."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, row: BatchRow) -> None:
        """Redraw, unless that was done a moment ago."""
        self._row = row
        if time.monotonic() - self._drawn >= _REFRESH_S:
            self._draw(row)

    def log(self, row: BatchRow) -> None:
        """The display shows every batch."""

    def close(self) -> None:
        """Draw the last batch and leave it there."""
        if self._row is not None and self._live.is_started:
            self._draw(self._row)
            self._live.stop()

    def _draw(self, row: BatchRow) -> None:
        self._drawn = time.monotonic()
        self._live.start()
        self._live.update(self._render(row), refresh=True)

    def _render(self, row: BatchRow) -> Group:
        done = row.batch + 1
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=self._num_batches, completed=done, width=30),
            f"step {done}/{self._num_batches}",
            self._clock.after(row.batch),
        )
        return Group(head, Text(figures(row, self._num_ranks)))
