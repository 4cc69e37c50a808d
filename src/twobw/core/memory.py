"""Memory over time: what ranks hold while a timeline runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twobw.core.dependencies import compute_spans
from twobw.core.ops import OpKind
from twobw.core.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage holds.

    Attributes:
        fixed_bytes: all the time: weights in all versions, optimizer state, buffers.
        gradient_bytes: for each update, from its first backward to its end.
        stash_bytes: for each microbatch, from the end of its forward to the end of its backward.
        forward_bytes: during a forward, its own stash included.
        backward_bytes: during a backward, besides its stash.
    """

    fixed_bytes: int = 0
    gradient_bytes: int = 0
    stash_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


def memory_over_time(
    timeline: Timeline, stages: Mapping[int, StageBytes], microbatches_per_update: int
) -> dict[int, list[tuple[int, int]]]:
    """For each rank ``(ns, bytes)``, ascending: from each time on it holds so much, until the
    next. Microbatches begun before the timeline are held from its start.

    Args:
        timeline: of whole ops.
        stages: by stage.
        microbatches_per_update: of the schedule.
    """
    start = min((span.start_ns for span in timeline.spans), default=0)
    return {
        rank: _steps(
            start, _changes(compute_spans(timeline, rank), start, stages, microbatches_per_update)
        )
        for rank in timeline.ranks
    }


def peak_bytes(steps: list[tuple[int, int]]) -> int:
    """The most of what `memory_over_time` gives for a rank."""
    return max((held for _, held in steps), default=0)


def _steps(start: int, changes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sums; what is let go at a time goes before what is taken then."""
    held, steps = 0, dict[int, int]()
    for at, change in sorted(changes):
        held += change
        steps[max(at, start)] = held
    return list(steps.items())


def _changes(
    spans: list[Span], start: int, stages: Mapping[int, StageBytes], per_update: int
) -> list[tuple[int, int]]:
    """``(ns, bytes)`` taken or, below 0, let go."""
    changes = [(start, stages[stage].fixed_bytes) for stage in {span.op.stage for span in spans}]
    forwards = {(s.op.stage, s.op.microbatch) for s in spans if s.op.kind is OpKind.FORWARD}
    held: set[tuple[int, int]] = set()  # updates whose gradients are begun
    for span in spans:
        op, stage = span.op, stages[span.op.stage]
        update = (op.stage, op.microbatch // per_update)
        if op.kind is OpKind.FORWARD:
            changes.append((span.start_ns, stage.forward_bytes))
            changes.append((span.end_ns, stage.stash_bytes - stage.forward_bytes))
        elif op.kind is OpKind.BACKWARD:
            if (op.stage, op.microbatch) not in forwards:
                changes.append((start, stage.stash_bytes))
            if update not in held:
                held.add(update)
                changes.append((span.start_ns, stage.gradient_bytes))
            changes.append((span.start_ns, stage.backward_bytes))
            changes.append((span.end_ns, -stage.backward_bytes - stage.stash_bytes))
        elif update in held:
            held.remove(update)
            changes.append((span.end_ns, -stage.gradient_bytes))
    return changes
