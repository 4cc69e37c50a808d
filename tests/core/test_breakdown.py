"""What a batch's time is made of."""

from dataclasses import replace

import pytest

from twobw.core.breakdown import break_down
from twobw.core.costs import LinkCost, PipelineCost, StageCost
from twobw.core.generators import generate
from twobw.core.idle import Reason
from twobw.core.simulator import play
from twobw.core.steady import steady_state
from twobw.core.timeline import Timeline


def timeline(schedule: str, stages: list[StageCost], batches: int = 8, link: int = 0) -> Timeline:
    cost = PipelineCost.of(len(stages), stages, LinkCost(link))
    return play(generate(schedule, len(stages), 4, batches), cost)


def test_a_flush_is_idle_for_its_bubble() -> None:
    """1F1B of 3 equal stages and 4 microbatches: m / (m + p - 1) = 4 / 6 busy."""
    found = break_down(timeline("1f1b", [StageCost(10, 20)] * 3))
    assert found is not None
    assert found.period_ns == 6 * 30
    for rank in range(3):
        assert found.busy[rank] == pytest.approx(4 / 6)
        assert found.idle[rank][Reason.BUBBLE] == pytest.approx(2 / 6)
    assert found.of_ranks([0, 1, 2])["work"] == pytest.approx(4 / 6)


def test_a_slow_stage_makes_the_others_wait() -> None:
    found = break_down(timeline("2bw", [StageCost(10, 20), StageCost(20, 40)]))
    assert found is not None
    assert found.period_ns == 4 * 60
    assert found.busy[0] == pytest.approx(0.5)
    assert found.idle[0][Reason.IMBALANCE] == pytest.approx(0.5)
    assert found.busy[1] == pytest.approx(1.0)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe"])
def test_is_that_of_the_steady_state(schedule: str) -> None:
    cost = PipelineCost.of(3, [StageCost(10, 20), StageCost(11, 19), StageCost(9, 23)], LinkCost(5))
    state = steady_state(schedule, 4, cost)
    found = break_down(state.timeline(9))
    assert found is not None
    assert found.period_ns == pytest.approx(float(state.period_ns), abs=1)


def test_interrupted_batches_are_left_out() -> None:
    whole = timeline("1f1b", [StageCost(10, 20)] * 2, batches=9)
    pause = 10_000
    late = [
        replace(span, start_ns=span.start_ns + pause, end_ns=span.end_ns + pause)
        if span.op.batch > 4
        else span
        for span in whole.spans
    ]
    found, expected = break_down(replace(whole, spans=tuple(late))), break_down(whole)
    assert found is not None
    assert expected is not None
    assert found.busy == pytest.approx(expected.busy)


def test_nothing_of_a_short_timeline() -> None:
    assert break_down(timeline("1f1b", [StageCost(10, 20)], batches=3)) is None
    assert break_down(Timeline((), "measured")) is None
