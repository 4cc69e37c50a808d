"""The steady state of an endless schedule: its period, found without playing many batches.

From some batch on every batch is like the one before, a period later (`event_graph`). One batch of
every stage's stream is therefore enough, whatever the number of batches of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from twobw.core.costs import PipelineCost
from twobw.core.event_graph import EventGraph
from twobw.core.generators import generate, stage_program, stage_rule
from twobw.core.generators.rule import StageRule
from twobw.core.longest_path import settle_endless
from twobw.core.lowering import lower_ops
from twobw.core.ops import Op, OpKind
from twobw.core.simulator import play
from twobw.core.timeline import COMPUTE_LANE, Span, Timeline

_Place = tuple[int, OpKind, int]
_SERVES = {
    OpKind.SEND_ACTIVATION: OpKind.FORWARD,
    OpKind.RECV_ACTIVATION: OpKind.FORWARD,
    OpKind.SEND_GRADIENT: OpKind.BACKWARD,
    OpKind.RECV_GRADIENT: OpKind.BACKWARD,
    OpKind.REDUCE: OpKind.BACKWARD,
}


@dataclass(frozen=True, slots=True)
class SteadyState:
    """What every batch of a long run is like.

    Attributes:
        name: of the schedule.
        num_microbatches: of a batch.
        options: of the schedule.
        cost: of everything.
        cycle_ns: time of the slowest ring of ops that wait for each other.
        cycle_batches: batches around it; the period is ``cycle_ns / cycle_batches``.
        spans: of one batch's time, for all ranks; in whole ns, so that they may be off by one
            where the period is no whole number.
    """

    name: str
    num_microbatches: int
    options: tuple[tuple[str, int], ...]
    cost: PipelineCost
    cycle_ns: int
    cycle_batches: int
    spans: tuple[Span, ...]

    @property
    def period_ns(self) -> Fraction:
        """Time a batch, exactly."""
        return Fraction(self.cycle_ns, self.cycle_batches)

    def timeline(self, num_batches: int) -> Timeline:
        """The timeline of so many batches, as if cut out of a long run."""
        per_batch = sum(span.rank == 0 and span.op.kind is OpKind.UPDATE for span in self.spans)
        spans = (
            _later(span, n, self.num_microbatches, per_batch, round(n * self.period_ns))
            for n in range(num_batches)
            for span in self.spans
        )
        return Timeline(tuple(sorted(spans, key=lambda s: (s.start_ns, s.rank))), "simulated")

    def makespan_ns(self, num_batches: int) -> int:
        """Time of a run, from its first op to its last, exactly: the period for each batch, and
        what filling and draining take once. Played are as many batches as the run takes to become
        steady, at most all."""
        num_played = 2 * self._depth + self.cycle_batches
        while num_played < num_batches:
            cycles, rest = divmod(num_batches - num_played, self.cycle_batches)
            timeline = self._play(num_played + rest)
            if self._has_settled(timeline, num_played + rest):
                return timeline.makespan_ns + cycles * self.cycle_ns
            num_played *= 2
        return self._play(num_batches).makespan_ns

    @property
    def _depth(self) -> int:
        num_stages, options = len(self.cost.stages), dict(self.options)
        rule = stage_rule(self.name, 0, num_stages, self.num_microbatches, **options)
        return _depth(rule, self.num_microbatches)

    def _play(self, num_batches: int) -> Timeline:
        num_stages, options = len(self.cost.stages), dict(self.options)
        schedule = generate(self.name, num_stages, self.num_microbatches, num_batches, **options)
        return play(schedule, self.cost)

    def _has_settled(self, timeline: Timeline, num_batches: int) -> bool:
        """Whether all that ended in the last batches before the drain did so as long after what
        it is like as the cycle takes. Then so will all that follows."""
        ends = _ends_by_batch(timeline, self.num_microbatches)
        return all(
            ends[batch].items()
            == {
                op: end + self.cycle_ns for op, end in ends[batch - self.cycle_batches].items()
            }.items()
            for batch in range(num_batches - self._depth, num_batches)
        )


def steady_state(
    name: str, num_microbatches: int, cost: PipelineCost, **options: int
) -> SteadyState:
    """Find the steady state of a schedule of the registry.

    Args:
        name: of the schedule.
        num_microbatches: of a batch.
        cost: of everything, for each stage.
        **options: of the schedule.

    Raises:
        ValueError: as `twobw.core.generators.stage_rule`.
    """
    num_stages = len(cost.stages)
    programs = [
        _one_batch(name, stage, num_stages, num_microbatches, reduce=cost.reduces, **options)
        for stage in range(num_stages)
    ]
    graph = EventGraph(programs, range(num_stages), cost, num_microbatches, repeats=True)
    ends, cycle = settle_endless(graph)
    return SteadyState(
        name,
        num_microbatches,
        tuple(sorted(options.items())),
        cost,
        cycle.total_ns,
        cycle.num_batches,
        tuple(graph.spans(ends, cycle)),
    )


def _one_batch(
    name: str, stage: int, num_stages: int, num_microbatches: int, *, reduce: bool, **options: int
) -> tuple[Op, ...]:
    """What a stage does, lowered, from one batch's last forward to the next one's."""
    program = stage_program(name, stage, num_stages, num_microbatches, **options)
    for _ in range(_depth(program.rule, num_microbatches)):
        for _ in program.begin_batch():
            pass
    return tuple(
        lower_ops(
            program.begin_batch(),
            range(num_stages),
            microbatches_per_update=program.rule.microbatches_per_update,
            reduce=reduce,
        )
    )


def _depth(rule: StageRule, num_microbatches: int) -> int:
    """Batches after which a stage is full, so that all that follow are alike; and the most that an
    op waits for another one back."""
    return -(-rule.max_in_flight // num_microbatches) + 1


def _ends_by_batch(timeline: Timeline, num_microbatches: int) -> list[dict[_Place, int]]:
    """When ops ended, by the batch whose last forward on their rank was the next, and by rank,
    kind and how far their microbatch is from that batch."""
    begun: dict[tuple[int, OpKind, int], int] = {}
    for rank in timeline.ranks:
        batch = 0
        for op in (span.op for span in timeline.spans_of(rank) if span.lane == COMPUTE_LANE):
            begun[rank, op.kind, op.microbatch] = batch
            batch += op.kind is OpKind.FORWARD and (op.microbatch + 1) % num_microbatches == 0
    ends: list[dict[_Place, int]] = [{} for _ in range(max(begun.values()) + 1)]
    for span in timeline.spans:
        kind, microbatch = span.op.kind, span.op.microbatch
        batch = begun[span.rank, _SERVES.get(kind, kind), microbatch]
        ends[batch][span.rank, kind, microbatch - batch * num_microbatches] = span.end_ns
    return ends


def _later(span: Span, batches: int, num_microbatches: int, per_batch: int, by_ns: int) -> Span:
    """A span of a batch as it is some batches later, with ``per_batch`` versions made in each."""
    op = span.op
    moved = Op(
        op.kind,
        op.stage,
        op.microbatch + batches * num_microbatches,
        op.batch + batches,
        op.version + batches * per_batch,
    )
    return Span(moved, span.rank, span.lane, span.start_ns + by_ns, span.end_ns + by_ns)
