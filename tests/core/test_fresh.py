"""The family around 2BW: what is stale, what is held, when updates come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twobw.core.generators import generate, stage_rule
from twobw.core.occupancy import in_flight, live_versions, ops_by_stage
from twobw.core.ops import Op, OpKind

F, B, U = OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE
sizes = st.integers(1, 6)
extras = st.integers(0, 2)
lags = st.integers(0, 9)


def stale_share(ops: list[Op], kind: OpKind, batch: int) -> float:
    """The share of a batch's forwards (or backwards) on another version than the batch's own."""
    versions = [op.version for op in ops if op.kind is kind and op.batch == batch]
    assert set(versions) <= {batch - 1, batch}
    return versions.count(batch - 1) / len(versions)


@given(sizes, sizes, extras, lags)
def test_the_share_that_is_one_batch_old(p: int, m: int, extra: int, lag: int) -> None:
    schedule = generate("2bw-fresh", p, m, 4, extra_in_flight=extra, update_lag=lag)
    for stage, ops in enumerate(ops_by_stage(schedule)):
        share = min((p - 1 - stage) * (1 + extra) + lag, m) / m
        assert stale_share(ops, F, 2) == stale_share(ops, B, 2) == share


@given(sizes, sizes, extras)
def test_paci_is_fresh_but_for_the_forwards_that_have_begun(p: int, m: int, extra: int) -> None:
    ops_of = ops_by_stage(generate("paci", p, m, 4, extra_in_flight=extra))
    like = ops_by_stage(generate("2bw-fresh", p, m, 4, extra_in_flight=extra))
    for ops, fresh in zip(ops_of, like, strict=True):
        assert [op for op in ops if op.kind is not B] == [op for op in fresh if op.kind is not B]
        assert stale_share(ops, B, 2) == 0


@given(sizes, sizes, extras, lags)
def test_the_order_of_forwards_and_backwards_is_that_of_two_bw(
    p: int, m: int, extra: int, lag: int
) -> None:
    def order(name: str, **options: int) -> list[list[tuple[OpKind, int]]]:
        schedule = generate(name, p, m, 4, extra_in_flight=extra, **options)
        stages = ops_by_stage(schedule)
        return [[(op.kind, op.microbatch) for op in ops if op.kind is not U] for ops in stages]

    assert order("2bw-fresh", update_lag=lag) == order("paci") == order("2bw")


@given(sizes, sizes, extras, st.integers(0, 9))
def test_with_a_lag_of_all_microbatches_it_is_two_bw(
    p: int, m: int, extra: int, above: int
) -> None:
    fresh = generate("2bw-fresh", p, m, 4, extra_in_flight=extra, update_lag=m + above)
    for stage, (ops, old, deferred) in enumerate(
        zip(
            fresh.programs,
            generate("2bw", p, m, 4, extra_in_flight=extra).programs,
            generate("2bw", p, m, 4, extra_in_flight=extra, defer_update=True).programs,
            strict=True,
        )
    ):
        has_time = (p - 1 - stage) * (1 + extra) < m
        assert ops == (deferred if has_time else old)


@given(sizes, sizes, lags)
def test_an_update_comes_a_lag_of_microbatches_after_its_last_backward(
    p: int, m: int, lag: int
) -> None:
    schedule = generate("2bw-fresh", p, m, 5, update_lag=lag)
    for stage, ops in enumerate(ops_by_stage(schedule)):
        slots = min(lag, max(m - (p - 1 - stage), 0))
        backwards = [op for op in ops if op.kind in (B, U)]
        at = backwards.index(next(op for op in backwards if op.kind is U and op.batch == 1))
        assert backwards[at - 1].microbatch == 2 * m - 1 + slots


@pytest.mark.parametrize(
    ("name", "options", "slots", "buffers"),
    [
        ("2bw", {}, [2, 2, 2, 2], 1),
        ("2bw-fresh", {}, [2, 2, 2, 1], 1),
        ("2bw-fresh", {"update_lag": 1}, [2, 2, 2, 2], 2),
        ("paci", {}, [1, 1, 1, 1], 1),
    ],
)
def test_what_they_hold(name: str, options: dict[str, int], slots: list[int], buffers: int) -> None:
    schedule = generate(name, 4, 8, 4, **options)
    assert list(schedule.num_versions) == slots
    assert schedule.num_gradient_buffers == buffers
    stages = ops_by_stage(schedule)
    assert [max(in_flight(ops)) for ops in stages] == [4, 3, 2, 1]
    # One microbatch in flight: nothing runs beside the update, whatever the lag.
    assert [max(live_versions(ops)) for ops in stages[:-1]] == slots[:-1]


@given(sizes, sizes, extras, lags)
def test_limits_are_those_of_two_bw(p: int, m: int, extra: int, lag: int) -> None:
    for stage in range(p):
        limit = stage_rule("2bw", stage, p, m, extra_in_flight=extra).max_in_flight
        fresh = stage_rule("2bw-fresh", stage, p, m, extra_in_flight=extra, update_lag=lag)
        assert fresh.max_in_flight == limit
        assert stage_rule("paci", stage, p, m, extra_in_flight=extra).max_in_flight == limit
