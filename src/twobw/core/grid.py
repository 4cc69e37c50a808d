"""A schedule as a rank x step grid: printed, and parsed back.

A step is one forward or backward, all of equal length and links free, so ops of one column run
side by side. Whatever else a program holds (updates, transfers, reductions) stands in the cell
of the forward or backward next to it, in program order. ``.`` is an idle step::

    stage 0 | F0@0  F1@0   .    B0@0   .    B1@0 U1@1
    stage 1 |  .    F0@0  B0@0  F1@0  B1@0 U1@1

Where a rank is not a stage, rows are ranks and each op names its stage: ``rank 0 | 2:F3@1``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from twobw.core.ops import Op, OpKind, parse_op
from twobw.core.replay import Event, data_source, event, replay
from twobw.core.schedule import Schedule

_ROW = re.compile(r"\s*(stage|rank) (\d+) \|(.*)")
_IDLE = "."


def format_grid(schedule: Schedule, faulty: Collection[tuple[int, int]] = ()) -> str:
    """The grid of any schedule, legal or not.

    Ops that can never run follow those that can. Those of ``faulty``, given as (rank, index in
    the rank's program), are marked: ``>F3@1<``.
    """
    label = "stage" if _is_rank_stage(schedule) else "rank"
    rows: list[dict[int, list[str]]] = []
    for rank, columns in enumerate(place(schedule)):
        cells: dict[int, list[str]] = {}
        for index, (op, column) in enumerate(zip(schedule.programs[rank], columns, strict=True)):
            text = str(op) if label == "stage" else f"{op.stage}:{op}"
            text = f">{text}<" if (rank, index) in faulty else text
            cells.setdefault(column, []).append(text)
        rows.append(cells)
    return "\n".join(f"{label} {rank} | {line}".rstrip() for rank, line in enumerate(_align(rows)))


def place(schedule: Schedule) -> list[list[int]]:
    """The grid column of every op, by rank and index in the rank's program."""
    columns = [[0] * len(program) for program in schedule.programs]
    next_column = [0] * len(schedule.programs)
    ends: dict[Event, int] = {}
    for rank, index in _every_op(schedule):
        op = schedule.programs[rank][index]
        if _fills_a_step(op):
            source = data_source(op, schedule.num_stages)
            column = max(next_column[rank], ends.get(source, 0) if source else 0)
            columns[rank][index] = column
            next_column[rank] = ends[event(op)] = column + 1
    for program, row in zip(schedule.programs, columns, strict=True):
        _attach(program, row)
    return columns


def parse_grid(text: str, like: Schedule) -> Schedule:
    """Read a grid; the inverse of `format_grid`.

    Args:
        text: the rows; blank lines, the width of columns and marks of faulty cells do not matter.
        like: what a grid does not tell (name, sizes, what is declared) is taken from here.

    Raises:
        ValueError: a line is not a row, rows are not numbered 0, 1, ..., or a cell is not an op.
    """
    programs: list[tuple[Op, ...]] = []
    for line in filter(str.strip, text.splitlines()):
        match = _ROW.fullmatch(line)
        if match is None or int(match[2]) != len(programs):
            raise ValueError(
                f"grid row {line.strip()!r} does not begin with 'stage {len(programs)} |' "
                f"or 'rank {len(programs)} |'"
            )
        tokens = [token.strip("><") for token in match[3].split() if token != _IDLE]
        parse = _parse_stage_row if match[1] == "stage" else _parse_rank_row
        programs.append(tuple(parse(tokens, len(programs), like.num_microbatches)))
    return replace(like, programs=tuple(programs))


def _is_rank_stage(schedule: Schedule) -> bool:
    return all(op.stage == rank for rank, program in enumerate(schedule.programs) for op in program)


def _fills_a_step(op: Op) -> bool:
    return op.kind in (OpKind.FORWARD, OpKind.BACKWARD)


def _every_op(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Ops in an order in which they can run, then those that cannot, in program order."""
    reached = [0] * len(schedule.programs)
    for rank, index in replay(
        schedule.programs, partial(data_source, num_stages=schedule.num_stages)
    ):
        reached[rank] = index + 1
        yield rank, index
    for rank, program in enumerate(schedule.programs):
        yield from ((rank, index) for index in range(reached[rank], len(program)))


def _attach(program: tuple[Op, ...], columns: list[int]) -> None:
    """Place the ops that fill no step: with the step before, receives with the one after."""
    last, pending = 0, list[int]()
    has_step = False
    for index, op in enumerate(program):
        if _fills_a_step(op):
            last, has_step = columns[index], True
            for waiting in pending:
                columns[waiting] = last
            pending.clear()
        elif has_step and not pending and not op.kind.is_receive:
            columns[index] = last
        else:
            pending.append(index)
    for waiting in pending:
        columns[waiting] = last


def _align(rows: list[dict[int, list[str]]]) -> Iterator[str]:
    """One line a row; cells of a column are as wide as its widest."""
    texts = [{column: " ".join(cell) for column, cell in row.items()} for row in rows]
    widths: dict[int, int] = {}
    for row in texts:
        for column, text in row.items():
            widths[column] = max(widths.get(column, 0), len(text))
    for row in texts:
        end = max(row, default=-1) + 1
        yield "  ".join(
            row[column].ljust(width) if column in row else _IDLE.center(width)
            for column, width in ((column, widths.get(column, 1)) for column in range(end))
        )


def _parse_stage_row(tokens: list[str], stage: int, num_microbatches: int) -> Iterator[Op]:
    for token in tokens:
        yield parse_op(token, stage=stage, num_microbatches=num_microbatches)


def _parse_rank_row(tokens: list[str], rank: int, num_microbatches: int) -> Iterator[Op]:
    for token in tokens:
        stage, colon, text = token.partition(":")
        if not colon or not stage.isdecimal():
            raise ValueError(
                f"cell {token!r} of rank {rank} does not name its stage, as 2:F3@1 does"
            )
        yield parse_op(text, stage=int(stage), num_microbatches=num_microbatches)
