from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.core.strategies import generated
from twobw.core.costs import LinkCost, OverheadCost, SharedReduction, StageCost
from twobw.core.generators import generate
from twobw.core.idle import HELP, Gap, Reason, idle_gaps, idle_ns
from twobw.core.schedule import Schedule
from twobw.core.simulator import simulate
from twobw.core.timeline import Timeline

COST = StageCost(10, 20)


def gaps_of(timeline: Timeline, rank: int) -> list[tuple[int, int, str, str, str]]:
    return [
        (
            gap.start_ns,
            gap.end_ns,
            gap.reason.value,
            str(gap.before or ""),
            str(gap.waits_for or ""),
        )
        for gap in idle_gaps(timeline)
        if gap.rank == rank
    ]


def test_a_flush_leaves_bubbles_and_nothing_else() -> None:
    timeline = simulate(generate("1f1b", 2, 2, 1), COST)
    assert gaps_of(timeline, 0) == [
        (20, 40, "bubble", "B0@0", "B0@0"),
        (60, 70, "bubble", "B1@0", "B1@0"),
    ]
    assert gaps_of(timeline, 1) == [
        (0, 10, "bubble", "F0@0", "F0@0"),
        (70, 90, "bubble", "", ""),
    ]


def test_a_gap_says_on_whom_it_waits() -> None:
    gaps = idle_gaps(simulate(generate("1f1b", 2, 2, 1), COST))
    first = next(gap for gap in gaps if gap.rank == 0)
    assert first.waits_on == 1
    assert first.waits_for is not None
    assert first.waits_for.stage == 1


def test_waiting_for_a_slower_stage_is_imbalance() -> None:
    timeline = simulate(generate("2bw", 2, 4, 6), [COST, StageCost(20, 40)])
    idle = idle_ns(idle_gaps(timeline), 0)
    # 24 microbatches of 60 on stage 1, of 30 on stage 0
    assert idle[Reason.IMBALANCE] == pytest.approx(23 * 30, abs=40)
    assert idle[Reason.LINK] == idle[Reason.REDUCTION] == idle[Reason.OVERHEAD] == 0


def test_what_is_on_its_way_is_the_links_fault() -> None:
    timeline = simulate(generate("2bw", 2, 4, 6), COST, LinkCost(6))
    # F0 and B0 on stage 1 end at 46; stage 0 could have begun then
    assert (46, 52, "link", "B0@0", "B0@0") in gaps_of(timeline, 0)
    idle = idle_ns(idle_gaps(timeline), 0)
    without = simulate(generate("2bw", 2, 4, 6), COST)
    grown = timeline.makespan_ns - without.makespan_ns
    assert idle[Reason.LINK] == pytest.approx(grown, abs=6)
    assert idle[Reason.IMBALANCE] == 0


def test_an_update_that_waits_names_the_last_to_reduce() -> None:
    reductions = [SharedReduction((0, 1), 4)]
    timeline = simulate(generate("2bw", 2, 2, 3), COST, None, None, reductions)
    waits = [gap for gap in idle_gaps(timeline) if str(gap.before).startswith("U")]
    assert {gap.reason for gap in waits} == {Reason.REDUCTION}
    assert {(gap.rank, gap.waits_on) for gap in waits} == {(0, None), (1, 0)}
    alone = simulate(generate("1f1b", 2, 2, 2), StageCost(10, 20, reduce_ns=15))
    waits = [gap for gap in idle_gaps(alone) if gap.reason is Reason.REDUCTION]
    assert all(gap.waits_on is None and gap.duration_ns == 15 for gap in waits)


def test_what_is_nobodys_fault_is_overhead() -> None:
    timeline = simulate(generate("1f1b", 1, 2, 2), COST, None, OverheadCost(batch_ns=9))
    assert gaps_of(timeline, 0)[-1][2:4] == ("overhead", "F2@1")


def test_what_holds_up_a_stage_holds_up_those_that_wait_for_it() -> None:
    stages = [StageCost(10, 20), StageCost(10, 20, reduce_ns=50)]
    idle = idle_ns(idle_gaps(simulate(generate("2bw", 2, 4, 6), stages)), 0)
    assert idle[Reason.REDUCTION] > 5 * 40
    assert idle[Reason.IMBALANCE] == idle[Reason.LINK] == 0


def test_replicas_wait_for_their_own_pipeline() -> None:
    one = simulate(generate("1f1b", 2, 2, 1), COST)
    spans = [replace(s, rank=2 * s.rank + r) for s in one.spans for r in range(2)]
    gaps = idle_gaps(Timeline(tuple(spans), "measured"))
    assert {(g.rank, g.waits_on) for g in gaps if g.waits_for} == {(0, 2), (1, 3), (2, 0), (3, 1)}


def test_every_reason_has_a_remedy() -> None:
    assert set(HELP) == set(Reason)
    assert idle_gaps(Timeline((), "measured")) == []


@settings(deadline=None)
@given(generated())
def test_gaps_and_compute_fill_the_timeline(schedule: Schedule) -> None:
    stages = [StageCost(10 + s, 20, 3, 5) for s in range(schedule.num_stages)]
    timeline = simulate(schedule, stages, LinkCost(4), OverheadCost(1, 2, 3))
    gaps = idle_gaps(timeline)
    for rank in timeline.ranks:
        total = sum(idle_ns(gaps, rank).values())
        assert total + timeline.busy_ns(rank) == timeline.makespan_ns
    assert all(isinstance(gap, Gap) and gap.duration_ns > 0 for gap in gaps)
