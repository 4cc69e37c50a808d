import pytest

from twobw.core.costs import LinkCost, OverheadCost, PipelineCost, SharedReduction, StageCost
from twobw.core.losses import find_losses
from twobw.core.steady import steady_state


def test_each_cause_by_itself() -> None:
    even, skewed = [StageCost(10, 20, 6)] * 2, [StageCost(5, 10, 6), StageCost(15, 30, 6)]
    flush = find_losses("1f1b", 4, PipelineCost.of(2, even))
    assert (flush.work_ns, flush.bubble_ns, flush.period_ns) == (4 * 30 + 6, 30, 156)
    split = find_losses("2bw", 4, PipelineCost.of(2, skewed))
    assert (split.bubble_ns, split.imbalance_ns) == (0, 4 * 15)
    slow = find_losses("2bw", 4, PipelineCost.of(2, StageCost(10, 20), LinkCost(6)))
    assert slow.by_cause() == {**flush.by_cause(), "bubble": 0, "link": 4 * 6}
    busy = find_losses("2bw", 4, PipelineCost.of(2, StageCost(10, 20), None, OverheadCost(1, 0, 5)))
    assert busy.overhead_ns == 4 * 2 + 5
    waits = find_losses("1f1b", 4, PipelineCost.of(2, StageCost(10, 20, 0, 11)))
    assert waits.reduction_ns == 11


@pytest.mark.parametrize("name", ["2bw", "1f1b", "gpipe", "weight-stashing"])
def test_parts_add_up_to_the_period(name: str) -> None:
    stages = [StageCost(10, 21, 4, 30), StageCost(13, 20, 2, 50), StageCost(9, 18, 3, 8)]
    shared = [SharedReduction((0, 2), 5)]
    cost = PipelineCost.of(3, stages, LinkCost(3, 2), OverheadCost(1, 1, 1), shared)
    losses = find_losses(name, 5, cost)
    assert losses.period_ns == pytest.approx(float(steady_state(name, 5, cost).period_ns))
