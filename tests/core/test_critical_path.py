from itertools import pairwise

from hypothesis import given, settings

from tests.core.strategies import generated
from twobw.core.costs import LinkCost, SharedReduction, StageCost
from twobw.core.critical_path import critical_path
from twobw.core.generators import generate
from twobw.core.schedule import Schedule
from twobw.core.simulator import simulate
from twobw.core.timeline import Timeline


def names(timeline: Timeline) -> list[str]:
    return [f"{span.rank}:{span.op}" for span in critical_path(timeline)]


def test_there_and_back_again() -> None:
    timeline = simulate(generate("1f1b", 2, 1, 1), StageCost(10, 20), LinkCost(3))
    assert names(timeline) == [
        *("0:F0@0", "0:SA0@0", "1:F0@0", "1:B0@0", "1:SG0@0", "0:B0@0", "0:U0@1")
    ]


def test_the_slowest_stage_is_on_it_all_the_time() -> None:
    timeline = simulate(
        generate("2bw", 3, 4, 5), [StageCost(10, 20), StageCost(15, 30)] * 1 + [StageCost(10, 20)]
    )
    path = critical_path(timeline)
    slow = sum(span.duration_ns for span in path if span.rank == 1)
    assert slow >= 19 * 45
    assert sum(span.duration_ns for span in path) == timeline.makespan_ns


def test_it_goes_through_the_stage_that_came_last_to_a_reduction() -> None:
    shared = [SharedReduction((0, 1), 7)]
    timeline = simulate(generate("2bw", 2, 2, 3), StageCost(10, 20), None, None, shared)
    assert "0:R1@1" in names(timeline)


def test_an_empty_timeline_has_none() -> None:
    assert critical_path(Timeline((), "simulated")) == []


@settings(deadline=None)
@given(generated())
def test_without_latency_it_has_no_holes(schedule: Schedule) -> None:
    stages = [StageCost(10 + s, 20, 3, 5) for s in range(schedule.num_stages)]
    timeline = simulate(schedule, stages, LinkCost(4))
    path = critical_path(timeline)
    assert path[0].start_ns == 0
    assert all(a.end_ns == b.start_ns for a, b in pairwise(path))
    assert path[-1].end_ns == timeline.makespan_ns
