"""How deep: many stages of emulated layers, each of which sleeps for a set time.

Sleeping takes no processor, so 16 stages (processes) fit two cores: what is measured is the
schedule and the runtime, not arithmetic. A layer sleeps `--forward` ms in its forward and twice
that in its backward; tensors are tiny; m = 2p. The default is long, so that what is not sleep, some
milliseconds of waking, of Python and of gloo for each microbatch, is small beside it.

- A rank's busy fraction is its time in F, B and UPDATE, waits excluded, from the measured timeline.
  The window is whole batches in steady state: from the start of batch 2's first forward to that of
  the last batch's first forward, on each rank by itself.
- Throughput over ideal is the time that the sleeps of a batch add up to, m (f + b), over the time
  that a batch took in the same window.

Links: two further runs delay every transfer by `--delay` of f + b. That is done here, not in the
runtime: in those processes a send begins when its delay is over (`SlowLinks`), in order and without
blocking the sender, so that several messages may be on their way, as on a long wire.
2BW's steady rate is then (f + b) / (f + b + 2c (p - 1) / p), and with
`extra_in_flight = 1` nothing lost up to c of half a slot.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import torch
from emulated import WIDTH, SleepingLayer, SlowLinks
from harness import CONSOLE, Seat, Target, Team
from torch import nn

from twobw import Pipeline
from twobw.core.timeline import Timeline

FIRST_BATCH = 2  # of the window: before it the pipeline fills


@dataclass(frozen=True)
class Run:
    """One configuration.

    Attributes:
        schedule: by name.
        num_stages: p; a batch is 2p microbatches.
        forward_seconds: of a stage's forward; the backward takes twice that.
        delay_seconds: of each transfer.
        extra_in_flight: of 2BW.
        num_batches: trained; the window ends where the last of them begins.
    """

    schedule: str
    num_stages: int
    forward_seconds: float
    delay_seconds: float
    extra_in_flight: int
    num_batches: int

    @property
    def num_microbatches(self) -> int:
        """2p."""
        return 2 * self.num_stages

    @property
    def slot_seconds(self) -> float:
        """A microbatch's forward and backward."""
        return 3 * self.forward_seconds

    @property
    def expected(self) -> float:
        """The busy fraction by the formula above."""
        m, p, slot = self.num_microbatches, self.num_stages, self.slot_seconds
        if self.schedule == "1f1b":
            return m / (m + p - 1)
        if self.extra_in_flight:
            return 1.0
        return slot / (slot + 2 * self.delay_seconds * (p - 1) / p)


@dataclass(frozen=True)
class Outcome:
    """What was measured: busy fraction of each rank, and batch time in the window."""

    busy_fractions: list[float]
    batch_seconds: float

    @property
    def mean_busy(self) -> float:
        """Over the ranks."""
        return sum(self.busy_fractions) / len(self.busy_fractions)


class Worker:
    """One stage's process."""

    def __init__(self, seat: Seat, run: Run) -> None:
        seat.join()
        if run.delay_seconds:
            SlowLinks(run.delay_seconds).install()
        self._run = run
        self._pipeline = Pipeline(
            [lambda: SleepingLayer(run.forward_seconds)] * run.num_stages,
            nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            schedule=run.schedule,
            num_microbatches=run.num_microbatches,
            extra_in_flight=run.extra_in_flight,
        )

    def measure(self) -> Outcome | None:
        """Train; on rank 0 what the timeline says."""
        batch = torch.ones(self._run.num_microbatches, WIDTH)
        for _ in range(self._run.num_batches):
            self._pipeline.train_step(batch, batch)
        timeline = self._pipeline.timeline()
        return None if timeline is None else evaluate(timeline, self._run.num_batches)


def evaluate(timeline: Timeline, num_batches: int) -> Outcome:
    """Busy fraction and batch time in steady state."""
    fractions, batch_times = [], []
    for rank in timeline.ranks:
        spans = [span for span in timeline.spans_of(rank) if span.op.kind.is_compute]
        start, end = (
            next(span.start_ns for span in spans if span.op.batch == batch)
            for batch in (FIRST_BATCH, num_batches - 1)
        )
        busy = sum(span.duration_ns for span in spans if start <= span.start_ns < end)
        fractions.append(busy / (end - start))
        batch_times.append((end - start) / 1e9 / (num_batches - 1 - FIRST_BATCH))
    return Outcome(fractions, max(batch_times))


def main() -> None:
    """Measure, print, write."""
    options = parse()
    harness.warn_if_busy()
    rows, targets, results = [], [], []
    for num_stages in options.stages:
        for run in runs_of(num_stages, options):
            with (
                harness.one_thread_each(),
                Team(str(run), Worker, num_stages, {"run": run}) as team,
            ):
                team.wait_until_built()
                outcome = team.call("measure")[0]
            over_ideal = run.num_microbatches * run.slot_seconds / outcome.batch_seconds
            rows.append(row(run, outcome, over_ideal))
            targets += judge(run, outcome, over_ideal)
            results.append(
                {**asdict(run), **asdict(outcome), "expected": run.expected, "of_ideal": over_ideal}
            )
            CONSOLE.print(f"done: {rows[-1][0]}")
    columns = ["", "busy, mean", "least", "most", "expected", "throughput of ideal", "batch s"]
    harness.print_table("busy fraction in steady state, m = 2p", columns, rows)
    harness.report("depth", results, targets, options.json)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--stages", type=int, nargs="+", default=[8, 16], metavar="P")
    add("--forward", type=float, default=40.0, metavar="MS", help="a stage's forward (default 40)")
    add("--delay", type=float, default=0.1, help="of a transfer, as a share of f + b (default 0.1)")
    add("--batches", type=int, default=5, help="trained in each run (default 5)")
    add("--json", type=Path, metavar="FILE", help="default: out/depth.json beside this file")
    options = parser.parse_args()
    if options.batches < FIRST_BATCH + 2:
        parser.error(f"--batches is {options.batches}; at least {FIRST_BATCH + 2} are needed")
    return options


def runs_of(num_stages: int, options: argparse.Namespace) -> list[Run]:
    """What is run at one depth."""
    forward = options.forward / 1e3
    delay = options.delay * 3 * forward
    return [
        Run(schedule, num_stages, forward, delay_seconds, extra_in_flight, options.batches)
        for schedule, delay_seconds, extra_in_flight in (
            ("2bw", 0.0, 0),
            ("1f1b", 0.0, 0),
            ("2bw", delay, 0),
            ("2bw", delay, 1),
        )
    ]


def row(run: Run, outcome: Outcome, over_ideal: float) -> list[str]:
    """A row of the table."""
    name = f"{run.schedule}, p = {run.num_stages}"
    if run.delay_seconds:
        name += f", delay {run.delay_seconds * 1e3:.0f} ms, extra {run.extra_in_flight}"
    fractions = outcome.busy_fractions
    values = (outcome.mean_busy, min(fractions), max(fractions), run.expected, over_ideal)
    return [name, *(f"{value:.3f}" for value in values), f"{outcome.batch_seconds:.2f}"]


def judge(run: Run, outcome: Outcome, over_ideal: float) -> list[Target]:
    """The issue's targets; it asks for none of delayed links."""
    if run.delay_seconds:
        return []
    name, busy = f"{run.schedule} at p = {run.num_stages}", outcome.mean_busy
    agrees = Target(
        f"{name}: busy {busy:.3f} beside throughput over ideal {over_ideal:.3f}, off by",
        off(busy, over_ideal),
        0.03,
    )
    if run.schedule == "2bw":
        least = min(outcome.busy_fractions)
        return [Target(f"{name}: busy, least of the ranks", least, 0.95, at_least=True), agrees]
    what = f"{name}: busy {busy:.3f} beside m/(m + p - 1) = {run.expected:.3f}, off by"
    return [Target(what, off(busy, run.expected), 0.03), agrees]


def off(measured: float, expected: float) -> float:
    """Relative difference."""
    return abs(measured / expected - 1)


if __name__ == "__main__":
    main()
