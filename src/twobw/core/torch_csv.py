"""Schedules in the CSV notation of ``torch.distributed.pipelining``.

A row a rank, a cell a step: ``2F0`` is the forward of microbatch 0 on stage 2, ``2B0`` its whole
backward, ``2REDUCE_GRAD`` the reduction after the last backward, an empty cell an idle step.
The notation has neither weight versions nor updates: reading fills them in.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from twobw.core.generators import declare, stage_rule
from twobw.core.generators.rule import StageRule
from twobw.core.ops import Op, OpKind
from twobw.core.schedule import Schedule

_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_KINDS = {"F": OpKind.FORWARD, "B": OpKind.BACKWARD, "REDUCE_GRAD": OpKind.REDUCE}


def write_csv(schedule: Schedule) -> str:
    """The forwards and backwards, a row a rank; torch's compute-only format."""
    return "".join(
        ",".join(
            f"{op.stage}{op.kind.value}{op.microbatch}"
            for op in program
            if op.kind in (OpKind.FORWARD, OpKind.BACKWARD)
        )
        + "\n"
        for program in schedule.programs
    )


def read_csv(
    text: str, *, name: str | None = None, num_microbatches: int | None = None, **options: int
) -> Schedule:
    """A schedule from torch's compute-only format, legal or not: `check` judges it.

    Without ``name`` it is one flushed batch of as many microbatches as are there, on version 0,
    with any number in flight. With it, versions, update and limits are those of the schedule of
    that name and its ``options``, and ``num_microbatches`` make a batch. An update follows its
    last backward (and its reduction, if there is one).

    Raises:
        ValueError: a cell is no forward, whole backward or reduction, a stage has no cell,
            ``num_microbatches`` is missing beside a ``name`` (or stands alone), or what
            `generate` refuses.
    """
    if (name is None) != (num_microbatches is None):
        raise ValueError(
            f"name is {name!r} and num_microbatches is {num_microbatches}; "
            "give both, or neither for one flushed batch"
        )
    rows = [list(_row(number, cells)) for number, cells in enumerate(_cells(text), 1)]
    ops = [op for row in rows for op in row]
    stages = {op.stage for op in ops}
    for stage in range(max(len(stages), 1)):
        if stage not in stages:
            raise ValueError(f"no cell is of stage {stage}; stages are numbered from 0 on")
    total = 1 + max(op.microbatch for op in ops)
    if name is None or num_microbatches is None:
        declared = _one_flushed_batch(len(stages), total)
        flush = StageRule(total, 1, total, version=lambda microbatch: 0)
        rules = [flush] * len(stages)
    else:
        num_batches = -(-total // max(num_microbatches, 1))
        declared = declare(name, len(stages), num_microbatches, num_batches, **options)
        rules = [
            stage_rule(name, stage, len(stages), num_microbatches, **options)
            for stage in range(len(stages))
        ]
    return replace(declared, programs=tuple(tuple(_fill(row, declared, rules)) for row in rows))


def _cells(text: str) -> list[list[str]]:
    """The cells of each row, stripped; blank lines at the end are no rows."""
    return [[cell.strip() for cell in row] for row in csv.reader(text.rstrip().splitlines())]


def _row(number: int, cells: list[str]) -> Iterator[Op]:
    """The ops of a row, without batches and versions; reductions of a stage count 0, 1, ..."""
    reductions: Counter[int] = Counter()
    for column, cell in enumerate(cells, 1):
        if not cell:
            continue
        match = _CELL.fullmatch(cell)
        kind = _KINDS.get(match[2]) if match else None
        if match is None or kind is None or (kind is OpKind.REDUCE) == bool(match[3]):
            raise ValueError(
                f"row {number}, cell {column}: {cell!r} is not a forward (2F0), a whole backward "
                "(2B0) or a reduction (2REDUCE_GRAD); schedules with split backwards are not "
                "supported, and those with transfers must be written with format='compute_only'"
            )
        stage = int(match[1])
        microbatch = reductions[stage] if kind is OpKind.REDUCE else int(match[3])
        reductions[stage] += kind is OpKind.REDUCE
        yield Op(kind, stage, microbatch, 0, 0)


def _one_flushed_batch(num_stages: int, num_microbatches: int) -> Schedule:
    return Schedule(
        name="csv",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_batches=1,
        microbatches_per_update=num_microbatches,
        num_versions=(1,) * num_stages,
        max_in_flight=(num_microbatches,) * num_stages,
        num_gradient_buffers=1,
        programs=(),
    )


def _fill(row: list[Op], declared: Schedule, rules: list[StageRule]) -> Iterator[Op]:
    """The ops of a row with their batches and versions, and with the updates."""
    per_update = declared.microbatches_per_update
    made = [
        op.microbatch + 1 if op.kind is OpKind.REDUCE else op.microbatch // per_update + 1
        for op in row
    ]
    last = {
        (op.stage, version): index
        for index, (op, version) in enumerate(zip(row, made, strict=True))
        if op.kind is not OpKind.FORWARD
    }
    updates: Counter[int] = Counter()
    for index, (op, version) in enumerate(zip(row, made, strict=True)):
        newest = version * per_update - 1
        update = Op(OpKind.UPDATE, op.stage, newest, newest // declared.num_microbatches, version)
        if op.kind is OpKind.REDUCE:
            yield replace(update, kind=OpKind.REDUCE)
        else:
            batch = op.microbatch // declared.num_microbatches
            yield replace(op, batch=batch, version=_version(op, rules[op.stage], updates[op.stage]))
        if last.get((op.stage, version)) == index:
            updates[op.stage] += 1
            yield update


def _version(op: Op, rule: StageRule, newest: int) -> int:
    """The version that a forward or backward runs on after ``newest`` updates."""
    if op.kind is OpKind.BACKWARD:
        return rule.backward_version(op.microbatch)
    version = rule.version(op.microbatch)
    return max(version, newest) if rule.backward_on_newest else version
