from itertools import combinations, pairwise

import pytest

from tests.planner.support import cluster, layer, profile
from twobw.core.memory import memory_over_time, peak_bytes
from twobw.core.steady import steady_state
from twobw.planner.candidates import Candidates
from twobw.planner.configuration import Configuration, Training, defers_updates
from twobw.planner.costing import pipeline_cost
from twobw.planner.memory import stage_memory
from twobw.planner.paper import find_paper_plans
from twobw.planner.plan import Plan
from twobw.planner.search import Search, find_plans
from twobw.profiler.profile import LinkProfile, ModelProfile

TRAINING = Training(global_batch_size=8)
SLOW = LinkProfile(latency_ns=0, bytes_per_second=10**9)


def gpt(**more: int) -> ModelProfile:
    """Embedding, six equal blocks, head."""
    sizes = (1, 2)
    entries = [
        layer("Embedding", forward_ns=10, backward_ns=10, num_parameters=50, sizes=sizes),
        layer(
            forward_ns=1000,
            backward_ns=2000,
            num_parameters=100,
            stash_bytes=more.get("stash_bytes", 700),
            handed_bytes=more.get("handed_bytes", 10),
            sizes=sizes,
        ),
        layer("Head", forward_ns=400, backward_ns=800, num_parameters=50, sizes=sizes),
    ]
    return profile(entries, [0, 1, 1, 1, 1, 1, 1, 2])


def names(search: Search) -> list[str]:
    return [f"{plan.pp}x{plan.dp} {plan.schedule}" for plan in search.plans]


def test_no_split_of_no_configuration_is_faster() -> None:
    model, devices = gpt(handed_bytes=100), cluster(4, inside=SLOW)
    best = find_plans(model, devices, TRAINING, top=1).plans[0]
    for configuration in Candidates(model, devices, TRAINING).configurations():
        for cuts in combinations(range(1, 8), configuration.pp - 1):
            split = tuple(b - a for a, b in pairwise((0, *cuts, 8)))
            cost = pipeline_cost(model, devices, TRAINING, configuration, split)
            defers = defers_updates(model, TRAINING, configuration, split)
            if configuration.schedule == "2bw-fresh" and defers:
                continue  # as fast as 2bw at the most
            options = configuration.options(defers=defers)
            period = steady_state(
                configuration.schedule, configuration.num_microbatches, cost, **options
            ).period_ns
            assert best.batch_ns <= float(period) * 1.02


def test_plans_are_what_the_simulator_says_of_them() -> None:
    plans = find_plans(gpt(), cluster(4), TRAINING).plans
    assert [plan.batch_ns for plan in plans] == sorted(plan.batch_ns for plan in plans)
    for plan in plans:
        state = steady_state(plan.schedule, plan.num_microbatches, plan.cost(), **plan.options)
        assert plan.batch_ns == round(state.period_ns)
        assert plan.microbatch_size * plan.num_microbatches * plan.dp == 8
        assert plan.samples_per_second == pytest.approx(8 / plan.batch_ns * 1e9)
    assert sum(plans[0].losses.values()) == pytest.approx(plans[0].batch_ns, abs=1)


def test_the_best_plan_tells_what_it_was_chosen_among() -> None:
    limit = 80_000
    search = find_plans(gpt(stash_bytes=20_000), cluster(2, memory=limit), TRAINING, top=4)
    best, *rest = search.plans
    assert all(plan.alternatives == () for plan in rest)
    others = {other.layout: other for other in best.alternatives}
    assert len(others) == len(best.alternatives)
    for plan in search.plans:
        other = others[plan.layout]
        assert other.is_simulated
        assert (other.samples_per_second, other.peak_bytes) == (
            plan.samples_per_second,
            plan.peak_bytes,
        )
    estimated = [other for other in best.alternatives if not other.is_simulated]
    keeps_all = next(o for o in estimated if o.layout.startswith("pp=2 dp=1 gpipe b="))
    assert "recompute" not in keeps_all.layout
    assert keeps_all.peak_bytes > limit  # and yet is told of
    depths = {int(other.layout.split()[0].removeprefix("pp=")) for other in best.alternatives}
    assert depths == {1, 2}
    fitting = [o for o in best.alternatives if o.peak_bytes <= limit]
    assert best.samples_per_second == max(o.samples_per_second for o in fitting if o.is_simulated)


def test_with_room_and_fast_links_replicas_are_best() -> None:
    assert names(find_plans(gpt(), cluster(4), TRAINING))[0] == "1x4 1f1b"


def test_where_a_device_is_too_small_stages_are_added() -> None:
    whole = stage_memory(gpt(), TRAINING, Configuration(1, 1, 1, 8, "1f1b"), [8], 0).total
    search = find_plans(gpt(), cluster(4, memory=whole * 0.5), TRAINING)
    assert min(plan.pp for plan in search.plans) > 1
    for plan in search.plans:
        assert plan.peak_bytes <= whole * 0.5
    assert str(search.rejections[0]).startswith("pp=1: stage 0 needs 12.0 kB of 7.7, even with")


def test_slow_links_want_more_in_flight() -> None:
    slow = LinkProfile(latency_ns=0, bytes_per_second=10**8)
    model = gpt(handed_bytes=400)  # 4 us a message beside 9 us of a slot
    plans = find_plans(model, cluster(2, inside=slow), TRAINING, top=40).plans
    best = next(plan for plan in plans if plan.pp == 2 and plan.microbatch_size == 1)
    assert best.extra_in_flight >= 1


def test_recompute_where_nothing_else_fits() -> None:
    model = gpt(stash_bytes=20_000)
    roomy = find_plans(model, cluster(2, memory=1e9), TRAINING).plans[0]
    tight = find_plans(model, cluster(2, memory=80_000), TRAINING).plans[0]
    assert roomy.recompute == "none"
    assert tight.recompute == "layer"


def test_memory_may_move_layers_to_later_stages() -> None:
    model = gpt(stash_bytes=3_000)
    even = find_plans(model, cluster(2), TRAINING, schedules=["2bw"], top=40).plans
    plain = next(p for p in even if p.pp == 2 and p.recompute == "none" and p.microbatch_size == 1)
    assert plain.stages[0].memory_bytes > plain.stages[1].memory_bytes
    limit = plain.peak_bytes - 1
    tight = find_plans(model, cluster(2, memory=limit), TRAINING, schedules=["2bw"], top=40).plans
    moved = [p for p in tight if p.pp == 2 and p.recompute == "none" and p.extra_in_flight == 0]
    assert moved
    assert all(p.split[0] < plain.split[0] for p in moved)


def test_nothing_fits() -> None:
    search = find_plans(gpt(), cluster(2, memory=4_000), TRAINING)
    assert search.plans == []
    assert [r.configuration.pp for r in search.rejections] == [1, 2]
    first, second = search.remedies
    assert first.startswith("devices with 6.4 kB for training instead of 4.0: pp=2")
    deeper = find_plans(gpt(), cluster(int(second.split()[0]), memory=4_000), TRAINING)
    shallower = find_plans(gpt(), cluster(int(second.split()[0]) - 1, memory=4_000), TRAINING)
    assert "devices instead of 2: pp=" in second
    assert deeper.plans
    assert not shallower.plans


def test_the_remedies_help() -> None:
    needed = find_plans(gpt(), cluster(2, memory=4_000), TRAINING).rejections[-1].needed_bytes
    assert find_plans(gpt(), cluster(2, memory=needed), TRAINING).plans
    assert not find_plans(gpt(), cluster(2, memory=needed - 1), TRAINING).plans


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    model = profile([layer(sizes=(4,))], [0, 0])
    with pytest.raises(ValueError, match="a global batch of 6 samples cannot be cut into micro"):
        find_plans(model, cluster(2), Training(6))


def test_pipelines_within_nodes_where_messages_are_large() -> None:
    between = LinkProfile(latency_ns=0, bytes_per_second=10**8)
    model = gpt(handed_bytes=4_000)
    search = find_plans(
        model, cluster(2, nodes=2, between=between, memory=9_0000), TRAINING, schedules=["2bw"]
    )
    best = next(plan for plan in search.plans if plan.pp == 2)
    assert best.placement == "pipelines"


def test_a_plan_survives_its_file() -> None:
    plan = find_plans(gpt(), cluster(4), TRAINING).plans[0]
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match=r"plan is no plan:(.|\n)*pp: "):
        Plan.from_json(plan.to_json().replace('"pp": ', '"pp": -'))


def test_the_papers_planner_ranks_by_its_closed_form() -> None:
    plans = find_paper_plans(gpt(), cluster(4), TRAINING, top=5)
    assert {plan.cost_model for plan in plans} == {"paper"}
    assert [plan.batch_ns for plan in plans] == sorted(plan.batch_ns for plan in plans)
    assert all(plan.schedule == ("2bw" if plan.pp > 1 else "1f1b") for plan in plans)
    two = next(p for p in plans if p.pp == 1 and p.dp == 4 and p.microbatch_size == 1)
    assert two.batch_ns == 2 * (6 * 3000 + 20 + 1200)


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh", "1f1b", "gpipe"])
def test_memory_over_time_peaks_at_what_the_memory_model_says(schedule: str) -> None:
    plans = find_plans(gpt(), cluster(4), TRAINING, schedules=[schedule], top=60).plans
    plan = next(plan for plan in plans if plan.pp == 4 and plan.num_microbatches == 8)
    timeline = steady_state(schedule, 8, plan.cost(), **plan.options).timeline(3)
    steps = memory_over_time(timeline, plan.stage_bytes(), 8)
    for stage in range(4):
        assert peak_bytes(steps[stage]) == plan.stages[stage].memory_bytes


def test_of_very_deep_pipelines_fewer_plans_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = find_plans(gpt(), cluster(4), TRAINING).plans
    monkeypatch.setattr("twobw.planner.search._MOST_FORWARDS", 1)
    fewer = find_plans(gpt(), cluster(4), TRAINING).plans
    assert len(fewer) <= 3 < len(all_of_them)
    assert fewer[0].layout == all_of_them[0].layout
    monkeypatch.setattr("twobw.planner.search._MOST_ALTERNATIVES", 3)
    best = find_plans(gpt(), cluster(4), TRAINING).plans[0]
    assert sum(not other.is_simulated for other in best.alternatives) == 3
