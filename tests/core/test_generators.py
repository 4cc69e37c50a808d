from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import generated, names_and_options
from twobw.core.checker import check
from twobw.core.generators import generate, stage_program, stage_rule
from twobw.core.occupancy import in_flight, live_versions, ops_by_stage
from twobw.core.ops import Op, OpKind
from twobw.core.schedule import Schedule

sizes = st.integers(1, 6)


def identities(ops: tuple[Op, ...]) -> set[tuple[OpKind, int, int]]:
    return {(op.kind, op.microbatch, op.version) for op in ops}


@given(generated())
def test_versions_held_and_microbatches_in_flight_stay_as_declared(schedule: Schedule) -> None:
    for stage, ops in enumerate(ops_by_stage(schedule)):
        assert max(in_flight(ops)) <= schedule.max_in_flight[stage]
        assert max(live_versions(ops)) <= schedule.num_versions[stage]


@given(sizes, sizes, st.integers(2, 5))
def test_two_bw_reaches_its_bound_in_flight(p: int, m: int, num_batches: int) -> None:
    schedule = generate("2bw", p, m, num_batches)
    for stage, ops in enumerate(ops_by_stage(schedule)):
        assert max(in_flight(ops)) == min(p - stage, 2 * m)


@given(st.integers(2, 6), st.integers(1, 9), st.integers(0, 2))
def test_extra_in_flight_is_reached_and_gated_by_version(p: int, m: int, extra: int) -> None:
    schedule = generate("2bw", p, m, 6, extra_in_flight=extra)
    for stage, ops in enumerate(ops_by_stage(schedule)):
        limit = min(p - stage + extra * (p - 1 - stage), 2 * m)
        assert schedule.max_in_flight[stage] == limit
        assert max(in_flight(ops)) == limit


@pytest.mark.parametrize(
    ("name", "peaks"),
    [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8]), ("no-pipeline", [1, 1, 1, 1])],
)
def test_flushes_hold_one_version(name: str, peaks: list[int]) -> None:
    stages = ops_by_stage(generate(name, 4, 8, 3))
    assert [max(in_flight(ops)) for ops in stages] == peaks
    assert [max(live_versions(ops)) for ops in stages] == [1, 1, 1, 1]


def test_weight_stashing_holds_a_version_for_each_microbatch_in_flight() -> None:
    stages = ops_by_stage(generate("weight-stashing", 4, 8, 2))
    assert [max(in_flight(ops)) for ops in stages] == [4, 3, 2, 1]
    assert [max(live_versions(ops)) for ops in stages] == [4, 3, 2, 1]


def test_two_bw_holds_two_versions_at_any_depth() -> None:
    for stage in ops_by_stage(generate("2bw", 6, 6, 4)):
        assert max(live_versions(stage)) == 2


@given(names_and_options(), sizes, sizes, sizes)
def test_a_stream_is_the_finite_schedule(
    kind: tuple[str, dict[str, Any]], p: int, m: int, num_batches: int
) -> None:
    name, options = kind
    finite = generate(name, p, m, num_batches, **options)
    for stage in range(p):
        stream = stage_program(name, stage, p, m, **options)
        ops: list[Op] = []
        for batch in range(num_batches):
            ops += stream.begin_batch()
            assert (ops[-1].kind, ops[-1].microbatch) == (OpKind.FORWARD, (batch + 1) * m - 1)
        assert (*ops, *stream.drain()) == finite.programs[stage]
        assert not list(stream.drain())


@given(names_and_options(), sizes, sizes, st.lists(st.booleans(), min_size=1, max_size=5))
def test_draining_between_batches_is_legal_and_changes_no_version(
    kind: tuple[str, dict[str, Any]], p: int, m: int, drains: list[bool]
) -> None:
    name, options = kind
    programs = []
    for stage in range(p):
        stream = stage_program(name, stage, p, m, **options)
        ops: list[Op] = []
        for drain in [*drains[:-1], True]:
            ops += stream.begin_batch()
            ops += stream.drain() if drain else ()
        programs.append(tuple(ops))
    undrained = generate(name, p, m, len(drains), **options)
    drained = replace(undrained, programs=tuple(programs))
    assert check(drained) == []
    if undrained.backward_on_newest:
        return  # forwards find the newest version, as is tested below
    for ops_drained, ops_undrained in zip(drained.programs, undrained.programs, strict=True):
        assert identities(ops_drained) == identities(ops_undrained)


@given(sizes, sizes)
def test_after_a_drain_a_single_slot_holds_the_newest_version_only(p: int, m: int) -> None:
    for stage in range(p):
        stream = stage_program("paci", stage, p, m)
        list(stream.begin_batch())
        list(stream.drain())
        forwards = [op for op in stream.begin_batch() if op.kind is OpKind.FORWARD]
        assert {op.version for op in forwards} == {1}


@given(names_and_options(), sizes, sizes, st.integers(0, 4))
def test_a_stream_can_begin_at_any_batch(
    kind: tuple[str, dict[str, Any]], p: int, m: int, first_batch: int
) -> None:
    name, options = kind
    for stage in range(p):
        drained = stage_program(name, stage, p, m, **options)
        for _ in range(first_batch):
            list(drained.begin_batch())
        list(drained.drain())
        resumed = stage_program(name, stage, p, m, first_batch=first_batch, **options)
        for _ in range(3):
            assert list(resumed.begin_batch()) == list(drained.begin_batch())
        assert list(resumed.drain()) == list(drained.drain())


def test_a_deferred_update_waits_for_the_first_forward_that_needs_it() -> None:
    for ops in generate("2bw", 3, 4, 5, defer_update=True).programs:
        for at, op in enumerate(ops[:-1]):
            if op.kind is OpKind.UPDATE and op.batch < 3:
                following = ops[at + 1]
                assert following.kind is OpKind.FORWARD
                assert following.microbatch == (op.batch + 2) * 4


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("2wb", 2, 2, 1), {}, "'2wb' is not one of 2bw, .* did you mean '2bw'"),
        (("2bw", 0, 2, 1), {}, "num_stages is 0; it must be at least 1"),
        (("2bw", 2, 0, 1), {}, "num_microbatches is 0; it must be at least 1"),
        (("2bw", 2, 2, 0), {}, "num_batches is 0; it must be at least 1"),
        (("2bw", 2, 2, 1), {"extra_in_flight": -1}, "extra_in_flight is -1; .* at least 0"),
        (("gpipe", 2, 2, 1), {"extra_in_flight": 1}, "'gpipe' does not know .*extra_in_flight"),
        (("2bw", 2, 2, 1), {"extra": 1}, "it has extra_in_flight, defer_update"),
        (("paci", 2, 2, 1), {"update_lag": 1}, "'paci' does not know .*update_lag"),
        (("2bw-fresh", 2, 2, 1), {"update_lag": -1}, "update_lag is -1; .* at least 0"),
    ],
)
def test_wrong_settings_are_named(
    arguments: tuple[str, int, int, int], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(*arguments, **options)


def test_the_registry_knows_the_version_rules() -> None:
    def versions(name: str, stage: int) -> list[int]:
        rule = stage_rule(name, stage, 3, 2)
        return [rule.version(microbatch) for microbatch in range(8)]

    assert versions("2bw", 0) == versions("2bw", 2) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert versions("2bw-fresh", 0) == versions("paci", 0) == versions("2bw", 0)  # x = m
    assert versions("2bw-fresh", 1) == versions("paci", 1) == [0, 0, 0, 1, 1, 2, 2, 3]
    assert versions("2bw-fresh", 2) == versions("paci", 2) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert versions("weight-stashing", 0) == [0, 0, 0, 1, 2, 3, 4, 5]
    assert versions("weight-stashing", 2) == [0, 1, 2, 3, 4, 5, 6, 7]
    for name in ("1f1b", "gpipe", "no-pipeline"):
        assert versions(name, 1) == [0, 0, 1, 1, 2, 2, 3, 3]
