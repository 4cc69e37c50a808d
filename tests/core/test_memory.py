import pytest

from twobw.core.costs import PipelineCost, StageCost
from twobw.core.generators import generate
from twobw.core.memory import StageBytes, memory_over_time, peak_bytes
from twobw.core.simulator import simulate
from twobw.core.steady import steady_state

COST = StageCost(10, 20)


def peaks(name: str, p: int, m: int, stage: StageBytes) -> list[int]:
    timeline = simulate(generate(name, p, m, 3), COST)
    steps = memory_over_time(timeline, dict.fromkeys(range(p), stage), m)
    return [peak_bytes(steps[rank]) for rank in range(p)]


def test_every_step_of_one_microbatch() -> None:
    stage = StageBytes(1000, gradient_bytes=200, stash_bytes=30, forward_bytes=35, backward_bytes=7)
    timeline = simulate(generate("1f1b", 1, 1, 2), StageCost(10, 20, 5))
    assert memory_over_time(timeline, {0: stage}, 1) == {
        0: [(0, 1035), (10, 1237), (30, 1200), (35, 1035), (45, 1237), (65, 1200), (70, 1000)]
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [("2bw", [4, 3, 2, 1]), ("1f1b", [4, 3, 2, 1]), ("gpipe", [6] * 4), ("no-pipeline", [1] * 4)],
)
def test_as_many_stashes_as_are_in_flight(name: str, expected: list[int]) -> None:
    assert peaks(name, 4, 6, StageBytes(stash_bytes=1)) == expected


def test_what_is_older_than_the_timeline_is_held_from_its_start() -> None:
    timeline = steady_state("2bw", 4, PipelineCost.of(3, COST)).timeline(2)
    steps = memory_over_time(timeline, dict.fromkeys(range(3), StageBytes(stash_bytes=1)), 4)
    assert [peak_bytes(steps[rank]) for rank in range(3)] == [3, 2, 1]
    assert steps[0][0][1] == 3
