"""Play all programs together: who waits on whom, and whether everything ends.

The checker (does it end?), the grid (which ops stand side by side?) and the simulator (when?)
are readers of this one replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from twobw.core.ops import Op, OpKind

Event: TypeAlias = tuple[OpKind, int, int]
"""Kind, stage and microbatch of an op that has run."""


def event(op: Op) -> Event:
    """What has happened once ``op`` has run."""
    return op.kind, op.stage, op.microbatch


def data_source(op: Op, num_stages: int) -> Event | None:
    """The forward or backward on a neighbouring stage whose result ``op`` takes; None where it
    takes none."""
    if op.kind is OpKind.FORWARD and op.stage > 0:
        return op.kind, op.stage - 1, op.microbatch
    if op.kind is OpKind.BACKWARD and op.stage < num_stages - 1:
        return op.kind, op.stage + 1, op.microbatch
    return None


def awaited(op: Op, rank_of_stage: Sequence[int]) -> Event | None:
    """What must have happened before ``op`` of a lowered program can run: a receive waits for its
    send, a forward or backward for a neighbouring stage of its own rank."""
    if op.kind is OpKind.RECV_ACTIVATION:
        return OpKind.SEND_ACTIVATION, op.stage - 1, op.microbatch
    if op.kind is OpKind.RECV_GRADIENT:
        return OpKind.SEND_GRADIENT, op.stage + 1, op.microbatch
    source = data_source(op, len(rank_of_stage))
    is_local = source is not None and rank_of_stage[source[1]] == rank_of_stage[op.stage]
    return source if is_local else None


def replay(
    programs: Sequence[Sequence[Op]], awaits: Callable[[Op], Event | None]
) -> Iterator[tuple[int, int]]:
    """Rank and index of each op that can run, in an order in which they can, the same each time.

    Every rank runs its program in order and stops at an op whose awaited event has not happened;
    nothing else blocks (sends do not). Ops that are not yielded can never run.
    """
    happened: set[Event] = set()
    waiting: dict[Event, list[int]] = {}
    positions = [0] * len(programs)
    ready = deque(range(len(programs)))
    while ready:
        rank = ready.popleft()
        program = programs[rank]
        while positions[rank] < len(program):
            op = program[positions[rank]]
            needs = awaits(op)
            if needs is not None and needs not in happened:
                waiting.setdefault(needs, []).append(rank)
                break
            yield rank, positions[rank]
            positions[rank] += 1
            happened.add(event(op))
            ready.extend(waiting.pop(event(op), ()))
