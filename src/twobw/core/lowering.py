"""Lowering: compute ops -> the same with sends, receives and gradient reductions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from twobw.core.ops import Op, OpKind
from twobw.core.schedule import Schedule


def lower_ops(
    ops: Iterable[Op],
    rank_of_stage: Sequence[int],
    *,
    microbatches_per_update: int,
    reduce: bool = False,
) -> Iterator[Op]:
    """Stream one rank's compute ops with the transfers they need, receives just before and sends
    just after; with ``reduce``, a ``REDUCE`` after each update's last backward.

    Neighbouring stages on one rank need no transfer.
    """
    last = len(rank_of_stage) - 1
    for op in ops:
        rank, stage = rank_of_stage[op.stage], op.stage
        from_previous = stage > 0 and rank_of_stage[stage - 1] != rank
        from_next = stage < last and rank_of_stage[stage + 1] != rank
        match op.kind:
            case OpKind.FORWARD:
                if from_previous:
                    yield replace(op, kind=OpKind.RECV_ACTIVATION)
                yield op
                if from_next:
                    yield replace(op, kind=OpKind.SEND_ACTIVATION)
            case OpKind.BACKWARD:
                if from_next:
                    yield replace(op, kind=OpKind.RECV_GRADIENT)
                yield op
                if from_previous:
                    yield replace(op, kind=OpKind.SEND_GRADIENT)
                if reduce and (op.microbatch + 1) % microbatches_per_update == 0:
                    made = (op.microbatch + 1) // microbatches_per_update
                    yield replace(op, kind=OpKind.REDUCE, version=made)
            case _:
                yield op


def lower(schedule: Schedule, *, reduce: bool = False) -> Schedule:
    """The whole schedule, lowered."""
    rank_of_stage = stage_ranks(schedule)
    return replace(
        schedule,
        programs=tuple(
            tuple(
                lower_ops(
                    program,
                    rank_of_stage,
                    microbatches_per_update=schedule.microbatches_per_update,
                    reduce=reduce,
                )
            )
            for program in schedule.programs
        ),
    )


def is_lowered(schedule: Schedule) -> bool:
    """Whether the programs hold transfers already."""
    return any(op.kind.is_transfer for program in schedule.programs for op in program)


def stage_ranks(schedule: Schedule) -> tuple[int, ...]:
    """The rank that owns each stage, read from the programs."""
    owner = {op.stage: rank for rank, program in enumerate(schedule.programs) for op in program}
    return tuple(owner[stage] for stage in range(schedule.num_stages))
