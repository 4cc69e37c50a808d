"""Every generated schedule is legal; changed in a way that matters, it is not; nothing crashes."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.strategies import garbage, generated, generated_or_lowered, scrambled
from twobw.core.checker import check, format_violations
from twobw.core.ops import Op, OpKind
from twobw.core.schedule import Schedule

F, B, U = OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE
Program = tuple[Op, ...]


def with_program(schedule: Schedule, rank: int, program: Program) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = program
    return replace(schedule, programs=tuple(programs))


def swapped(program: Program, i: int, j: int) -> Program:
    ops = list(program)
    ops[i], ops[j] = ops[j], ops[i]
    return tuple(ops)


def has_reductions(schedule: Schedule) -> bool:
    return any(op.kind is OpKind.REDUCE for program in schedule.programs for op in program)


def pairs_that_matter(schedule: Schedule, rank: int) -> Iterator[tuple[int, int]]:
    """Places i < j of one rank (of one stage) whose swap no schedule can stand: forward and
    backward of one microbatch, two forwards, two backwards, an update and a backward it takes,
    a backward and the forward for which it makes room."""
    program, per_update = schedule.programs[rank], schedule.microbatches_per_update
    in_flight = 0
    for i, first in enumerate(program):
        in_flight += (first.kind is F) - (first.kind is B)
        for j in range(i + 1, len(program)):
            second = program[j]
            kinds = (first.kind, second.kind)
            is_full = in_flight + 1 == schedule.max_in_flight[rank]
            if (
                (kinds == (F, B) and first.microbatch == second.microbatch)
                or kinds in ((F, F), (B, B))
                or (kinds == (B, U) and 0 <= second.microbatch - first.microbatch < per_update)
                or (kinds == (B, F) and j == i + 1 and is_full)
            ):
                yield i, j


@given(generated_or_lowered())
def test_every_generated_schedule_is_legal(schedule: Schedule) -> None:
    assert check(schedule) == []


@given(generated(), st.data())
def test_a_swap_that_matters_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    i, j = data.draw(st.sampled_from(list(pairs_that_matter(schedule, rank))))
    assert check(with_program(schedule, rank, swapped(schedule.programs[rank], i, j)))


def refused_at_a_drawn_op(change: Callable[[Program, int], Program]) -> Callable[[], None]:
    @given(generated_or_lowered(), st.data())
    def test(schedule: Schedule, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, schedule.num_stages - 1))
        program = schedule.programs[rank]
        at = data.draw(st.integers(0, len(program) - 1))
        changed = with_program(schedule, rank, change(program, at))
        assume(has_reductions(changed) == has_reductions(schedule))  # none at all is legal too
        assert check(changed), f"{program[at]} of rank {rank}"

    return test


test_a_dropped_op_is_refused = refused_at_a_drawn_op(lambda ops, at: ops[:at] + ops[at + 1 :])
test_a_doubled_op_is_refused = refused_at_a_drawn_op(lambda ops, at: ops[: at + 1] + ops[at:])
test_an_op_doubled_at_the_end_is_refused = refused_at_a_drawn_op(lambda ops, at: (*ops, ops[at]))


@given(generated_or_lowered(), st.data(), st.integers(-1, 9))
def test_a_wrong_version_is_refused(schedule: Schedule, data: st.DataObject, version: int) -> None:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    program = schedule.programs[rank]
    at = data.draw(st.integers(0, len(program) - 1))
    assume(program[at].version != version)
    wrong = replace(program[at], version=version)
    assert check(with_program(schedule, rank, (*program[:at], wrong, *program[at + 1 :])))


@given(generated())
def test_declaring_less_than_is_needed_is_refused(schedule: Schedule) -> None:
    fewer = tuple(max(limit - 1, 1) for limit in schedule.max_in_flight)
    assume(fewer != schedule.max_in_flight and schedule.num_batches > 1)
    found = check(replace(schedule, max_in_flight=fewer))
    assert {violation.rule for violation in found} == {"in-flight"}


@given(garbage | scrambled())
def test_nothing_crashes_the_checker(schedule: Schedule) -> None:
    violations = check(schedule)
    for violation in violations:
        assert (violation.op is None) == (violation.index is None)
        if violation.rank is not None and violation.index is not None:
            assert schedule.programs[violation.rank][violation.index] == violation.op
    assert len(format_violations(schedule, violations).splitlines()) >= len(violations)
