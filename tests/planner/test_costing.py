from typing import Any

import pytest

from tests.planner.support import cluster, layer, profile
from twobw.core.costs import OverheadCost, PipelineCost, SharedReduction, StageCost
from twobw.core.generators import generate
from twobw.core.ops import OpKind
from twobw.core.simulator import play
from twobw.core.steady import steady_state
from twobw.planner.configuration import Configuration, Training, defers_updates
from twobw.planner.costing import pipeline_cost, reduce_slots
from twobw.planner.prediction import simulated_ns
from twobw.profiler.profile import LinkProfile, ModelProfile

TRAINING = Training(8)
SLOW = LinkProfile(latency_ns=5, bytes_per_second=10**9)


def model(**more: Any) -> ModelProfile:
    entry = layer(num_parameters=10, handed_bytes=60, update_ns=7, version_copy_ns=3, sizes=(1, 2))
    loss = layer("loss", forward_ns=11, backward_ns=13, sizes=(1, 2))
    return profile([entry], [0] * 4, loss=loss, **more)


def cost(configuration: Configuration, training: Training = TRAINING, **more: Any) -> PipelineCost:
    return pipeline_cost(model(**more), cluster(8, inside=SLOW), training, configuration, [3, 1])


def test_a_stage_is_its_layers_and_the_last_has_the_loss() -> None:
    first, last = cost(Configuration(2, 1, 2, 4, "1f1b")).stages
    assert first == StageCost(600, 1200, 21, 0, 120)
    assert last == StageCost(200 + 22, 400 + 26, 7, 0, 0)


def test_recompute_is_in_the_backward_but_for_the_loss() -> None:
    first, last = cost(Configuration(2, 1, 1, 8, "1f1b", "layer")).stages
    assert (first.forward_ns, first.backward_ns) == (300, 900)
    assert (last.forward_ns, last.backward_ns) == (111, 313)


def test_two_versions_are_copied() -> None:
    fresh = cost(Configuration(2, 1, 1, 8, "2bw-fresh"))
    assert [stage.update_ns for stage in fresh.stages] == [30, 7]  # the last stage has one
    assert [stage.update_ns for stage in cost(Configuration(2, 1, 1, 8, "2bw")).stages] == [30, 10]


def test_replicas_reduce_and_share() -> None:
    first, _ = cost(Configuration(2, 2, 1, 4, "2bw")).stages
    assert first.reduce_ns == 120 + 2 * 5  # 30 parameters of fp32, nearly twice, between two
    sharded, _ = cost(Configuration(2, 2, 1, 4, "2bw"), Training(8, shard_optimizer=True)).stages
    assert sharded.update_ns == 21 // 2 + 60 + 5 + 9


def test_links_and_overhead() -> None:
    found = cost(Configuration(2, 1, 1, 8, "2bw"), overhead={"op_ns": 1, "message_ns": 2})
    assert found.overhead == OverheadCost(1, 2, 0)
    assert (found.links[0].latency_ns, found.links[0].occupied_ns(60)) == (5, 60)


def test_what_stages_reduce_together() -> None:
    tied = {"ties": [{"layers": (0, 3), "num_parameters": 100}]}
    plain = Configuration(2, 1, 1, 8, "2bw")
    assert cost(plain).reductions == ()
    assert cost(plain, **tied).reductions == (SharedReduction((0, 1), 400 + 10),)
    clipped = cost(plain, Training(8, clips=True))
    assert clipped.reductions == (SharedReduction((0, 1), 10),)
    assert cost(plain, precision="fp16").reductions == clipped.reductions
    within = {"ties": [{"layers": (0, 2), "num_parameters": 100}]}
    assert cost(plain, **within).reductions == ()


@pytest.mark.parametrize(
    ("training", "dp", "more", "expected"),
    [
        (TRAINING, 1, {}, False),
        (TRAINING, 2, {}, True),
        (Training(8, clips=True), 1, {}, True),
        (Training(8, clips=True, overlap_reduce=False), 1, {}, False),
        (TRAINING, 1, {"precision": "fp16"}, True),
        (TRAINING, 1, {"precision": "bf16"}, False),
        (TRAINING, 1, {"ties": [{"layers": (0, 3), "num_parameters": 1}]}, True),
    ],
)
def test_updates_come_later_where_they_need_others(
    training: Training, dp: int, more: dict[str, Any], expected: bool
) -> None:
    configuration = Configuration(2, dp, 1, 4, "2bw")
    assert defers_updates(model(**more), training, configuration, (3, 1)) is expected
    options = configuration.options(defers=expected)
    assert options == ({"defer_update": True} if expected else {})


def test_the_lag_is_what_flushed_batches_would_measure() -> None:
    stages = [StageCost(10, 20, 0, 25, 40)] * 3
    links = [cost(Configuration(2, 1, 1, 8, "2bw")).links[0]] * 2
    shared = PipelineCost.of(3, stages, links, None, [SharedReduction((0, 1, 2), 9)])
    spans = play(generate("1f1b", 3, 8, 2), shared).spans
    longest = max(s.duration_ns for s in spans if s.op.kind is OpKind.REDUCE)
    assert reduce_slots(shared, 8) == -(-longest // 30)
    assert reduce_slots(shared, 2) == 2
    assert reduce_slots(PipelineCost.of(2, StageCost(10, 20)), 8) == 0


def test_long_batches_are_extrapolated() -> None:
    stages = [StageCost(100, 210, 50, 900), StageCost(103, 200, 40, 700), StageCost(90, 190)]
    links = [cost(Configuration(2, 1, 1, 8, "2bw")).links[0]] * 2
    pipeline = PipelineCost.of(3, stages, links)
    for name in ("2bw", "1f1b", "gpipe"):
        exact = steady_state(name, 3000, pipeline).period_ns
        assert simulated_ns(name, 3000, pipeline, {}) == pytest.approx(float(exact), rel=1e-5)


def test_a_configuration_in_words() -> None:
    assert str(Configuration(2, 4, 1, 8, "1f1b")) == "pp=2 dp=4 1f1b b=1 m=8"
    many = Configuration(2, 4, 1, 8, "2bw", "layer", 1, 0, "pipelines")
    assert str(many).endswith("2bw +1 in flight b=1 m=8 recompute layer pipelines within nodes")
