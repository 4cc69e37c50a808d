"""Nothing waits that need not: what reductions, the global norm and ties cost 2BW.

Each comparison is of the same pipeline without clipping and ties ("without"), with both ("with"),
and with both but `overlap_reduce=False` ("waiting", for contrast). The variants' processes are
started once; a round gives each a turn, the first two in alternating order, and ratios are taken
within a round, medians over the rounds. "Others" is the most that other work took of the machine,
in cores: the GPT's speeds are worth something only where that is near zero.

- Emulated: layers that sleep (`emulated.py`), p = 2 and 4, m = p and 2p. In the variants that have
  something to reduce every call of a group (replicas, ties, norm) sleeps, so long that the calls
  that follow stage 0's last backward (`CALLS`) take `--share` of the m - (p - 1) microbatch slots
  that they may take. Each rank has a second replica that is emulated, too.
- Replicas: the same with two real replicas of two stages, four processes. "Without" has them also,
  and reduces, but at full speed.
- GPT: the model of `throughput.py` on two stages, m = 4, at the speed that this machine has.

Last, from the timeline of one batch of the last round's "with": how much of a rank's REDUCE lay
within F, B and UPDATE of the same rank, and where its UPDATE stood.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median

import contestants
import harness
import torch
from contestants import MICROBATCH_SIZE, MODEL, Contestant, SupportsFloat, Turn
from emulated import BACKWARD_OVER_FORWARD, WIDTH, SleepingLayer, SlowGroups
from harness import CONSOLE, Seat, Target, Team
from throughput import turns_of
from torch import Tensor, nn

import twobw
from twobw.core.ops import OpKind
from twobw.core.timeline import Span, Timeline
from twobw.models.gpt import gpt_layers, loss_fn

CALLS = 6  # gradients: which, their sum; tie: whether, its sum; norms: how many, which
NUM_UNTIMED = 2  # an update that is waited for comes two batches later
MAX_GRAD_NORM = 1.0
VARIANTS = ("without", "with", "waiting")


@dataclass(frozen=True)
class Setup:
    """One comparison.

    Attributes:
        pp: stages.
        dp: replicas that are processes.
        num_microbatches: m.
        forward_seconds: of a layer; its backward takes twice that. 0: the GPT.
        call_seconds: that each call of a group takes longer in "with" and "waiting".
    """

    pp: int
    dp: int
    num_microbatches: int
    forward_seconds: float = 0.0
    call_seconds: float = 0.0

    @property
    def num_processes(self) -> int:
        return self.pp * self.dp

    @property
    def is_emulated(self) -> bool:
        return self.forward_seconds > 0

    @property
    def slot_seconds(self) -> float:
        """A microbatch's forward and backward, where they are emulated."""
        return (1 + BACKWARD_OVER_FORWARD) * self.forward_seconds

    def __str__(self) -> str:
        what = "emulated" if self.is_emulated else "GPT"
        return f"{what} p{self.pp} dp{self.dp} m{self.num_microbatches}"


class Emulated:
    """One stage's process, of layers that sleep."""

    def __init__(self, seat: Seat, setup: Setup, variant: str) -> None:
        seat.join()
        has_features = variant != "without"
        layers = [SleepingLayer(setup.forward_seconds) for _ in range(setup.pp)]
        if has_features:
            layers[-1].weight = layers[0].weight
            SlowGroups(setup.call_seconds, twin_replicas=setup.dp == 1).install()
        self._pipeline = twobw.Pipeline(
            layers,
            nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            num_microbatches=setup.num_microbatches,
            pp=setup.pp,
            dp=setup.dp,
            max_grad_norm=MAX_GRAD_NORM if has_features else None,
            overlap_reduce=variant != "waiting",
        )
        self._batch = torch.ones(setup.num_microbatches, WIDTH)

    def turn(self, num_untimed: int, num_timed: int) -> Turn:
        """As `contestants.Contestant`'s."""
        cpu_start = time.process_time()
        for _ in range(num_untimed):
            self._pipeline.train_step(self._batch, self._batch)
        start = time.perf_counter()
        for _ in range(num_timed):
            self._pipeline.train_step(self._batch, self._batch)
        return Turn(time.perf_counter() - start, time.process_time() - cpu_start, [])

    def timeline(self) -> Timeline | None:
        """On rank 0."""
        return self._pipeline.timeline()


class GPT(Contestant):
    """One stage's process, of the GPT."""

    def __init__(self, seat: Seat, setup: Setup, variant: str) -> None:
        super().__init__(seat, setup.num_microbatches)
        seat.join()
        has_features = variant != "without"
        torch.manual_seed(contestants.SEED)
        layers = gpt_layers(replace(MODEL, tied=has_features))
        self._pipeline = twobw.Pipeline(
            layers,
            loss_fn,
            contestants.make_optimizer,
            num_microbatches=setup.num_microbatches,
            split=contestants.SPLIT,
            max_grad_norm=MAX_GRAD_NORM if has_features else None,
            overlap_reduce=variant != "waiting",
        )

    def train(self, inputs: Tensor, targets: Tensor) -> SupportsFloat:
        return self._pipeline.train_step(inputs, targets).loss

    def timeline(self) -> Timeline | None:
        """On rank 0."""
        return self._pipeline.timeline()


@dataclass(frozen=True)
class Outcome:
    """What was measured, by variant and round.

    Attributes:
        batch_seconds: of the timed batches, mean of the processes.
        processor_seconds: of a whole turn, all processes.
        other_cores: by turn, what others took of the machine meanwhile.
    """

    batch_seconds: dict[str, list[float]] = field(default_factory=lambda: {v: [] for v in VARIANTS})
    processor_seconds: dict[str, list[float]] = field(
        default_factory=lambda: {v: [] for v in VARIANTS}
    )
    other_cores: list[float] = field(default_factory=list)

    def speeds(self, variant: str) -> list[float]:
        """Over that of "without", by round."""
        return over(self.batch_seconds["without"], self.batch_seconds[variant])


@dataclass(frozen=True)
class Behind:
    """How one rank's reduction of one batch lay.

    Attributes:
        rank: the rank.
        batch: the batch.
        reduce_ms: from the start of its REDUCE to the end.
        share_within_compute: of that, within F, B and UPDATE of the rank.
        deferred_ms: from the end of the batch's last backward to the start of its UPDATE.
        waited_ms: that the rank computed nothing just before the UPDATE.
        before: the op that followed the UPDATE.
    """

    rank: int
    batch: int
    reduce_ms: float
    share_within_compute: float
    deferred_ms: float
    waited_ms: float
    before: str


def main() -> None:
    """Measure, print, write."""
    options = parse()
    harness.warn_if_busy()
    rows, behind_rows, targets, results = [], [], [], []
    for setup in setups(options):
        outcome, timeline = measure(setup, options)
        behind = look_behind(timeline)
        rows.append(row(setup, outcome))
        behind_rows += [behind_row(setup, rank) for rank in behind]
        targets.append(judge(setup, outcome))
        tokens = tokens_per_second(setup, outcome)
        one_batch = [asdict(rank) for rank in behind]
        results.append(
            {**asdict(setup), **asdict(outcome), "tokens_per_second": tokens, "behind": one_batch}
        )
        CONSOLE.print(f"done: {setup}")
    columns = ["", *VARIANTS, "calls", "with", "rounds", "waiting", "CPU", "others"]
    title = "2bw: s a batch, s in calls, speed over 'without', processor time 'with' over 'without'"
    harness.print_table(title, columns, rows)
    columns = ["", "REDUCE", "in compute", "UPDATE after", "waited", "before"]
    title = "one batch of 'with', in ms: REDUCE behind compute; UPDATE after the last backward"
    harness.print_table(title, columns, behind_rows)
    harness.report("overlap", results, targets, options.json)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    parts = ("emulated", "replicas", "gpt")
    add("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    add("--stages", type=int, nargs="+", default=[2, 4], metavar="P", help="of 'emulated'")
    add("--rounds", type=int, default=5, help="turns of 'without' and 'with' (default 5)")
    add("--microbatches", type=int, default=24, metavar="N", help="timed in a turn (default 24)")
    add("--forward", type=float, default=40.0, metavar="MS", help="of a layer (default 40)")
    add("--share", type=float, default=0.75, help="of their time that reductions take")
    add("--json", type=Path, metavar="FILE", help="default: out/overlap.json beside this file")
    return parser.parse_args()


def setups(options: argparse.Namespace) -> list[Setup]:
    """What is compared."""
    forward = options.forward / 1e3

    def emulated(pp: int, dp: int, num_microbatches: int) -> Setup:
        setup = Setup(pp, dp, num_microbatches, forward)
        num_slots = num_microbatches - (pp - 1)
        seconds = options.share * num_slots * setup.slot_seconds / CALLS
        return replace(setup, call_seconds=seconds)

    chosen: list[Setup] = []
    if "emulated" in options.parts:
        chosen += [emulated(pp, 1, m) for pp in options.stages for m in (pp, 2 * pp)]
    if "replicas" in options.parts:
        chosen.append(emulated(2, 2, 4))
    if "gpt" in options.parts:
        chosen.append(Setup(2, 1, 4))
    return chosen


def measure(setup: Setup, options: argparse.Namespace) -> tuple[Outcome, Timeline]:
    """Turns of all variants, and the timeline of "with"."""
    num_timed = max(2, options.microbatches // setup.num_microbatches)
    outcome = Outcome()
    teams = start(setup)
    try:
        for round_ in range(options.rounds):
            order = VARIANTS[:2] if round_ % 2 == 0 else VARIANTS[1::-1]
            for variant in order if round_ else VARIANTS:
                turns, other_cores = turns_of(teams[variant], NUM_UNTIMED, num_timed)
                outcome.batch_seconds[variant].append(mean(t.seconds for t in turns) / num_timed)
                outcome.processor_seconds[variant].append(sum(t.cpu_seconds for t in turns))
                if other_cores is not None:
                    outcome.other_cores.append(other_cores)
        timeline = teams["with"].call("timeline")[0]
    finally:
        for team in teams.values():
            team.close()
    return outcome, timeline


def start(setup: Setup) -> dict[str, Team]:
    """One team a variant; all start at once."""
    build: Callable[..., object] = Emulated if setup.is_emulated else GPT
    with harness.one_thread_each():
        teams = {
            variant: Team(
                f"{setup}, {variant}",
                build,
                setup.num_processes,
                {"setup": setup, "variant": variant},
            )
            for variant in VARIANTS
        }
    for team in teams.values():
        team.wait_until_built()
    return teams


def look_behind(timeline: Timeline) -> list[Behind]:
    """For each rank, the last batch whose UPDATE was waited for by a forward, not by a drain."""
    batch = max(span.op.batch for span in timeline.spans) - 2
    return [look_behind_on(timeline.spans_of(rank), batch) for rank in timeline.ranks]


def look_behind_on(spans: list[Span], batch: int) -> Behind:
    """One rank."""
    compute = [span for span in spans if span.op.kind.is_compute]
    (reduction,) = (s for s in spans if s.op.kind is OpKind.REDUCE and s.op.batch == batch)
    update = next(
        place
        for place, span in enumerate(compute)
        if span.op.kind is OpKind.UPDATE and span.op.batch == batch
    )
    last_backward = max(
        s.end_ns for s in compute if s.op.kind is OpKind.BACKWARD and s.op.batch == batch
    )
    within = sum(
        max(0, min(s.end_ns, reduction.end_ns) - max(s.start_ns, reduction.start_ns))
        for s in compute
    )
    start_ns = compute[update].start_ns
    return Behind(
        reduction.rank,
        batch,
        reduction.duration_ns / 1e6,
        within / max(reduction.duration_ns, 1),
        (start_ns - last_backward) / 1e6,
        (start_ns - compute[update - 1].end_ns) / 1e6,
        str(compute[update + 1].op),
    )


def over(numbers: list[float], others: list[float]) -> list[float]:
    """Ratios, by round; one of them may have fewer."""
    return [a / b for a, b in zip(numbers, others, strict=False)]


def row(setup: Setup, outcome: Outcome) -> list[str]:
    """A row of the first table."""
    speeds, calls = outcome.speeds("with"), CALLS * setup.call_seconds
    processor = over(outcome.processor_seconds["with"], outcome.processor_seconds["without"])
    return [
        str(setup),
        *(f"{median(outcome.batch_seconds[variant]):.3f}" for variant in VARIANTS),
        f"{calls:.3f}" if calls else "",
        f"{median(speeds):.4f}",
        f"{min(speeds):.3f}-{max(speeds):.3f}",
        f"{median(outcome.speeds('waiting')):.3f}",
        "" if setup.is_emulated else f"{median(processor):.3f}",
        f"{max(outcome.other_cores):.2f}" if outcome.other_cores else "",
    ]


def behind_row(setup: Setup, behind: Behind) -> list[str]:
    """A row of the second table."""
    return [
        f"{setup}: batch {behind.batch}, rank {behind.rank}",
        f"{behind.reduce_ms:.1f}",
        f"{100 * behind.share_within_compute:.0f} %",
        f"{behind.deferred_ms:.1f}",
        f"{behind.waited_ms:.2f}",
        behind.before,
    ]


def judge(setup: Setup, outcome: Outcome) -> Target:
    """The issue's targets."""
    speed = median(outcome.speeds("with"))
    if setup.is_emulated and setup.dp == 1:
        return Target(f"{setup}: idle caused by reduction, norm and tie", 1 - speed, 0.01)
    return Target(f"{setup}: 'with' over 'without'", speed, 0.97, at_least=True)


def tokens_per_second(setup: Setup, outcome: Outcome) -> dict[str, float] | None:
    """Of the GPT, by variant."""
    if setup.is_emulated:
        return None
    tokens = setup.num_microbatches * MICROBATCH_SIZE * MODEL.sequence_length
    return {variant: tokens / median(its) for variant, its in outcome.batch_seconds.items()}


if __name__ == "__main__":
    main()
