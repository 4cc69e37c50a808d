from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import names_and_options
from twobw.core.costs import LinkCost, OverheadCost, PipelineCost, SharedReduction, StageCost
from twobw.core.dependencies import compute_spans
from twobw.core.generators import generate
from twobw.core.ops import OpKind
from twobw.core.simulator import play
from twobw.core.steady import SteadyState, steady_state

nanoseconds = st.integers(0, 30)
stage_costs = st.builds(
    StageCost, st.integers(1, 30), st.integers(1, 30), nanoseconds, nanoseconds, nanoseconds
)
link_costs = st.builds(
    LinkCost, nanoseconds, nanoseconds, st.sampled_from([1e9, 5e8, float("inf")])
)


@st.composite
def pipeline_costs(draw: st.DrawFn) -> PipelineCost:
    p = draw(st.integers(1, 5))
    stages = draw(st.lists(stage_costs, min_size=p, max_size=p))
    links = draw(st.lists(link_costs, min_size=p - 1, max_size=p - 1))
    overhead = OverheadCost(*(draw(st.integers(0, 3)) for _ in range(3)))
    shared = st.sets(st.integers(0, p - 1), min_size=1).map(lambda its: tuple(sorted(its)))
    reductions = draw(st.lists(st.builds(SharedReduction, shared, nanoseconds), max_size=2))
    return PipelineCost.of(p, stages, links, overhead, reductions)


def period_ns(name: str, m: int, cost: PipelineCost, **options: int) -> Fraction:
    return steady_state(name, m, cost, **options).period_ns


@settings(deadline=None, max_examples=60)
@given(names_and_options(), st.integers(1, 5), pipeline_costs(), st.integers(1, 25))
def test_period_times_batches_and_fill_and_drain_equal_the_whole_run(
    named: tuple[str, dict[str, int]], m: int, cost: PipelineCost, n: int
) -> None:
    name, options = named
    whole = play(generate(name, len(cost.stages), m, n, **options), cost)
    assert steady_state(name, m, cost, **options).makespan_ns(n) == whole.makespan_ns


def test_thousands_of_batches_are_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    state = steady_state("2bw", 4, PipelineCost.of(4, StageCost(10, 20)))
    played: list[int] = []
    play_some = SteadyState._play
    monkeypatch.setattr(
        SteadyState, "_play", lambda self, n: played.append(n) or play_some(self, n)
    )
    assert state.makespan_ns(100_000) == (4 * 100_000 + 3) * 30
    assert sum(played) < 20


@pytest.mark.parametrize("p", [1, 2, 5])
def test_closed_forms(p: int) -> None:
    m, cost = p + 2, PipelineCost.of(p, StageCost(10, 20))
    assert period_ns("2bw", m, cost) == m * 30
    assert period_ns("1f1b", m, cost) == period_ns("gpipe", m, cost) == (m + p - 1) * 30
    assert period_ns("no-pipeline", m, cost) == m * p * 30


@pytest.mark.parametrize("p", [2, 4, 8])
def test_transfers_are_exposed_as_the_algorithm_says(p: int) -> None:
    cost = PipelineCost.of(p, StageCost(100, 200), LinkCost(30))
    exposed = Fraction(2 * 30 * (p - 1), p)
    assert period_ns("2bw", 2 * p, cost) == 2 * p * (300 + exposed)
    assert period_ns("2bw", 2 * p, cost, extra_in_flight=1) == 2 * p * 300


def test_the_period_need_not_be_a_whole_number() -> None:
    cost = PipelineCost.of(3, StageCost(10, 20), LinkCost(5))
    state = steady_state("weight-stashing", 1, cost)
    assert state.period_ns == Fraction(110, 3)  # (3 * 30 + 2 * 2 * 5) / 3 in flight
    starts = [span.start_ns for span in compute_spans(state.timeline(6), 0)]
    assert len(starts) == 6 * 3
    assert all(later - earlier == 110 for earlier, later in zip(starts, starts[9:], strict=False))


def test_stages_that_are_nearly_equal_take_no_long_search() -> None:
    # By playing it would take thousands of batches until stage 0 is held up by its limit.
    stages = [StageCost(100_000, 200_000), StageCost(100_001, 200_000)]
    cost = PipelineCost.of(2, stages, LinkCost(50_000))
    assert period_ns("2bw", 4, cost, extra_in_flight=1) == 4 * 300_001


def test_a_reduction_is_hidden_behind_the_next_batch_while_it_fits() -> None:
    def period(reduce_ns: int, p: int = 2, **options: int) -> Fraction:
        return period_ns("2bw", 4, PipelineCost.of(p, StageCost(10, 20, 0, reduce_ns)), **options)

    assert period(90, defer_update=True) == 120  # m - (p - 1) = 3 slots on stage 0
    assert period(91, defer_update=True) > 120
    assert period(1, defer_update=False) > 120


def test_a_shared_reduction_waits_for_the_last_stage() -> None:
    # A global norm at the last backward, p = m = 2: 0.75 of ideal; deferred: 1.0.
    cost = PipelineCost.of(2, StageCost(10, 20), reductions=[SharedReduction((0, 1))])
    assert 60 / period_ns("2bw", 2, cost) == Fraction(3, 4)
    assert period_ns("2bw", 2, cost, defer_update=True) == 60


def test_a_steady_timeline_is_one_batch_repeated() -> None:
    timeline = steady_state("2bw", 3, PipelineCost.of(2, StageCost(10, 20, 4))).timeline(3)
    spans = compute_spans(timeline, 1)
    ops = [span.op for span in spans]
    assert len(ops) == 3 * 7
    for earlier, later in zip(spans, spans[7:], strict=False):
        assert later.start_ns - earlier.start_ns == 94
        assert later.op.microbatch - earlier.op.microbatch == 3
        assert later.op.version - earlier.op.version == 1
    updates = [op.version for op in ops if op.kind is OpKind.UPDATE]
    assert updates == list(range(updates[0], updates[0] + 3))
