"""What one stage holds while its ops run: microbatches in flight, weight versions, gradients.

Each function takes the ops of one stage in program order and gives a count after each op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twobw.core.ops import Op, OpKind
from twobw.core.schedule import Schedule


def ops_by_stage(schedule: Schedule) -> list[list[Op]]:
    """The ops of each stage in program order."""
    stages: list[list[Op]] = [[] for _ in range(schedule.num_stages)]
    for program in schedule.programs:
        for op in program:
            stages[op.stage].append(op)
    return stages


def in_flight(ops: Sequence[Op]) -> Iterator[int]:
    """Microbatches between their forward and their backward."""
    open_microbatches: set[int] = set()
    for op in ops:
        if op.kind is OpKind.FORWARD:
            open_microbatches.add(op.microbatch)
        elif op.kind is OpKind.BACKWARD:
            open_microbatches.discard(op.microbatch)
        yield len(open_microbatches)


def live_versions(ops: Sequence[Op]) -> Iterator[int]:
    """Weight versions that must be held: the newest, and each that an op still to come runs on."""
    uses = (OpKind.FORWARD, OpKind.BACKWARD)
    last_use = {op.version: i for i, op in enumerate(ops) if op.kind in uses}
    newest, live = 0, {0}
    for i, op in enumerate(ops):
        if op.kind is OpKind.UPDATE:
            newest = max(newest, op.version)
            live.add(op.version)
        live = {version for version in live if version == newest or last_use.get(version, -1) > i}
        yield len(live)


def held_gradients(ops: Sequence[Op], microbatches_per_update: int) -> Iterator[int]:
    """Updates to come whose gradients are begun."""
    held: set[int] = set()
    for op in ops:
        group = op.microbatch // microbatches_per_update
        if op.kind is OpKind.BACKWARD:
            held.add(group)
        elif op.kind is OpKind.UPDATE:
            held.discard(group)
        yield len(held)
