import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import generated
from twobw.core.costs import LinkCost, OverheadCost, SharedReduction, StageCost
from twobw.core.generators import generate
from twobw.core.grid import parse_grid
from twobw.core.lowering import lower
from twobw.core.ops import OpKind
from twobw.core.schedule import Schedule
from twobw.core.simulator import simulate
from twobw.core.timeline import Timeline

costs = st.integers(1, 50)
COST = StageCost(forward_ns=10, backward_ns=20)


def batch_ns(timeline: Timeline) -> float:
    """Time of a batch in steady state: the mean over six batches before the last."""
    ends = list(timeline.batch_ends_ns().values())
    return (ends[-2] - ends[-8]) / 6


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 5), costs, costs)
def test_two_bw_never_waits(p: int, above: int, n: int, f: int, b: int) -> None:
    m = max(p - 1 + above, 1)
    timeline = simulate(generate("2bw", p, m, n), StageCost(f, b))
    assert timeline.makespan_ns == (m * n + p - 1) * (f + b)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2), costs, costs)
def test_the_schedules_around_two_bw_keep_its_pace(
    p: int, m: int, n: int, extra: int, f: int, b: int
) -> None:
    def makespan_ns(name: str, **options: int) -> int:
        schedule = generate(name, p, m, n, extra_in_flight=extra, **options)
        return simulate(schedule, StageCost(f, b)).makespan_ns

    expected = makespan_ns("2bw")
    assert makespan_ns("paci") == expected
    for lag in range(m + 1):
        assert makespan_ns("2bw-fresh", update_lag=lag) == expected


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@given(p=st.integers(1, 6), m=st.integers(1, 9), n=st.integers(1, 5), f=costs, b=costs)
def test_flushes_fill_and_drain_each_batch(
    name: str, p: int, m: int, n: int, f: int, b: int
) -> None:
    timeline = simulate(generate(name, p, m, n), StageCost(f, b))
    assert timeline.makespan_ns == n * (m + p - 1) * (f + b)
    assert timeline.busy_fraction(0) == pytest.approx(m / (m + p - 1))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), costs, costs)
def test_no_pipeline_runs_one_stage_at_a_time(p: int, m: int, n: int, f: int, b: int) -> None:
    timeline = simulate(generate("no-pipeline", p, m, n), StageCost(f, b))
    assert timeline.makespan_ns == n * m * p * (f + b)


@pytest.mark.parametrize(("p", "m"), [(3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (6, 4), (8, 5)])
def test_two_bw_below_p_less_1_keeps_a_rate_of_m_over_p_less_1(p: int, m: int) -> None:
    timeline = simulate(generate("2bw", p, m, 24), COST)
    assert batch_ns(timeline) == pytest.approx((p - 1) * 30)


def test_a_number_that_can_be_checked_on_paper() -> None:
    # 1F1B, 4 stages, 8 microbatches, forward and backward alike: makespan 22, bubble 3/11.
    timeline = simulate(generate("1f1b", 4, 8, 1), StageCost(1, 1))
    assert timeline.makespan_ns == 22
    assert [timeline.busy_fraction(rank) for rank in range(4)] == [pytest.approx(8 / 11)] * 4
    assert timeline.peak_in_flight() == {0: 4, 1: 3, 2: 2, 3: 1}


def test_a_transfer_delays_what_receives_it_and_nothing_else() -> None:
    timeline = simulate(generate("gpipe", 2, 2, 1), StageCost(10, 20), LinkCost(4))
    spans = {(s.rank, str(s.op), s.lane): (s.start_ns, s.end_ns) for s in timeline.spans}
    assert spans[0, "F1@0", "compute"] == (10, 20)  # does not wait for the send of microbatch 0
    assert spans[0, "SA0@0", "send 1"] == (10, 14)
    assert spans[1, "RA0@0", "recv 0"] == (0, 14)
    assert spans[1, "F0@0", "compute"] == (14, 24)
    assert spans[1, "RA1@0", "recv 0"] == (24, 24)  # it came while F0 ran
    assert spans[1, "B0@0", "compute"] == (34, 54)
    assert spans[0, "B0@0", "compute"] == (58, 78)
    assert timeline.makespan_ns == 98


def test_transfers_of_one_link_follow_each_other() -> None:
    timeline = simulate(generate("gpipe", 2, 3, 1), StageCost(10, 20), LinkCost(25))
    sends = [(s.start_ns, s.end_ns) for s in timeline.spans if s.lane == "send 1"]
    assert sends == [(10, 35), (35, 60), (60, 85)]


@pytest.mark.parametrize(("p", "rate"), [(2, 0.91), (4, 0.87), (8, 0.85)])
def test_transfers_are_exposed_as_the_algorithm_says(p: int, rate: float) -> None:
    timeline = simulate(generate("2bw", p, 2 * p, 12), StageCost(100, 200), LinkCost(30))
    assert 2 * p * 300 / batch_ns(timeline) == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_one_more_in_flight_hides_transfers_of_half_a_slot(p: int) -> None:
    schedule = generate("2bw", p, 2 * p, 12, extra_in_flight=1)
    timeline = simulate(schedule, StageCost(100, 200), LinkCost(150))
    assert batch_ns(timeline) == 2 * p * 300


def test_updates_take_time_and_are_busy() -> None:
    timeline = simulate(generate("1f1b", 1, 2, 3), StageCost(10, 20, update_ns=5))
    assert timeline.makespan_ns == 3 * (2 * 30 + 5)
    assert timeline.busy_fraction(0) == 1.0


def test_stages_of_their_own_cost() -> None:
    timeline = simulate(generate("2bw", 2, 4, 12), [StageCost(10, 20), StageCost(20, 40)])
    assert batch_ns(timeline) == 4 * 60  # the slowest stage sets the pace
    assert timeline.busy_ns(0) * 2 == timeline.busy_ns(1)


@given(generated())
def test_it_is_deterministic_and_complete(schedule: Schedule) -> None:
    lowered = lower(schedule, reduce=True)
    timeline = simulate(lowered, COST, LinkCost(3))
    assert timeline == simulate(lowered, COST, LinkCost(3))
    for rank, program in enumerate(lowered.programs):
        spans = timeline.spans_of(rank)
        assert sorted(str(span.op) for span in spans) == sorted(map(str, program))
        compute = [span.op for span in spans if span.lane == "compute"]
        assert compute == [op for op in program if op.kind.is_compute]


@given(generated())
def test_lowering_beforehand_changes_nothing(schedule: Schedule) -> None:
    assert simulate(schedule, COST, LinkCost(3)) == simulate(lower(schedule), COST, LinkCost(3))


def test_spans_of_a_lane_do_not_overlap() -> None:
    timeline = simulate(lower(generate("2bw", 3, 3, 3), reduce=True), COST, LinkCost(12))
    ends: dict[tuple[int, str], int] = {}
    for span in timeline.spans:
        assert span.start_ns >= ends.get((span.rank, span.lane), 0)
        ends[span.rank, span.lane] = span.end_ns
    kinds = {span.op.kind for span in timeline.spans}
    assert kinds == set(OpKind)


def test_a_schedule_that_never_ends_is_refused() -> None:
    schedule = parse_grid(
        """stage 0 | F0@0 B0@0 F1@0 B1@0 U1@1
           stage 1 | F0@0 F1@0 B0@0 B1@0 U1@1""",
        generate("gpipe", 2, 2, 1),
    )
    with pytest.raises(ValueError, match=r"'gpipe' never ends: .* wait for ever"):
        simulate(schedule, COST)


def test_a_wrong_number_of_costs_is_refused() -> None:
    with pytest.raises(ValueError, match="stages has 1 costs for 2 stages"):
        simulate(generate("gpipe", 2, 2, 1), [COST])


def spans_by_op(timeline: Timeline) -> dict[tuple[int, str], tuple[int, int]]:
    return {(s.rank, str(s.op)): (s.start_ns, s.end_ns) for s in timeline.spans}


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency_beside() -> None:
    stages = [StageCost(10, 20, output_bytes=3_000), StageCost(10, 20)]
    link = LinkCost(latency_ns=7, bytes_per_second=1e12)
    spans = spans_by_op(simulate(generate("gpipe", 2, 2, 1), stages, link))
    assert spans[0, "SA0@0"] == (10, 13)
    assert spans[1, "RA0@0"] == (0, 20)
    assert spans[1, "F0@0"] == (20, 30)
    assert spans[1, "SG0@0"] == (60, 63)  # the gradient is as large
    assert spans[0, "B0@0"] == (70, 90)


def test_each_link_has_its_own_cost() -> None:
    links = [LinkCost(1), LinkCost(5)]
    spans = spans_by_op(simulate(generate("gpipe", 3, 1, 1), StageCost(10, 20), links))
    assert [spans[stage, "F0@0"][0] for stage in range(3)] == [0, 11, 26]


def test_an_update_waits_for_its_reduction_and_no_other_op_does() -> None:
    schedule = generate("1f1b", 1, 2, 2)
    spans = spans_by_op(simulate(schedule, StageCost(10, 20, update_ns=5, reduce_ns=40)))
    assert spans[0, "R1@1"] == (60, 100)
    assert spans[0, "U1@1"] == (100, 105)
    deferred = spans_by_op(
        simulate(generate("2bw", 1, 2, 3, defer_update=True), StageCost(10, 20, 5, reduce_ns=40))
    )
    assert deferred[0, "R1@1"] == (60, 100)
    assert deferred[0, "F2@0"] == (60, 70)
    assert deferred[0, "U1@1"] == (120, 125)  # before the first forward that needs it


def test_reductions_of_a_rank_follow_each_other() -> None:
    schedule = generate("2bw", 1, 1, 3, defer_update=True)
    timeline = simulate(schedule, StageCost(10, 20, reduce_ns=70))
    lane = [(s.start_ns, s.end_ns) for s in timeline.spans if s.lane == "reduce"]
    assert lane == [(30, 100), (100, 170), (170, 240)]


def test_a_shared_reduction_waits_for_all_its_stages() -> None:
    schedule = generate("gpipe", 2, 1, 1)
    reductions = [SharedReduction((0, 1), 4)]
    spans = spans_by_op(simulate(schedule, StageCost(10, 20, reduce_ns=8), None, None, reductions))
    assert spans[1, "R0@1"] == (40, 72)  # stage 0's backward ends at 60
    assert spans[0, "R0@1"] == (60, 72)
    tied = [SharedReduction((0, 2)), SharedReduction((0, 1, 2), 5)]
    three = spans_by_op(
        simulate(generate("gpipe", 3, 1, 1), StageCost(10, 20, 0, 8), None, None, tied)
    )
    assert [three[stage, "R0@1"][1] for stage in range(3)] == [103, 103, 103]


def test_reductions_that_nobody_can_end_are_refused() -> None:
    text = """rank 0 | 0:F0@0 1:F0@0 1:B0@0 1:R0@1 1:U0@1 0:B0@0 0:R0@1 0:U0@1"""
    schedule = parse_grid(text, generate("gpipe", 2, 1, 1))
    assert simulate(schedule, COST).makespan_ns == 60
    with pytest.raises(ValueError, match="never ends: updates and reductions wait"):
        simulate(schedule, COST, None, None, [SharedReduction((0, 1))])


def test_overhead_stands_beside_the_layers() -> None:
    overhead = OverheadCost(op_ns=3, message_ns=2, batch_ns=50)
    spans = spans_by_op(
        simulate(generate("gpipe", 2, 2, 1), StageCost(10, 20), LinkCost(4), overhead)
    )
    assert spans[0, "F0@0"] == (50, 63)
    assert spans[0, "SA0@0"] == (65, 69)
    assert spans[0, "F1@0"] == (65, 78)
    assert spans[1, "RA0@0"] == (50, 69)
    assert spans[1, "F0@0"] == (71, 84)


def test_a_pipeline_of_replicas_keeps_its_pace_where_reductions_fit() -> None:
    stages = [StageCost(10, 20, reduce_ns=100)] * 2
    hidden = simulate(generate("2bw", 2, 8, 12, defer_update=True), stages)
    assert batch_ns(hidden) == 8 * 30
    exposed = simulate(generate("1f1b", 2, 8, 12), stages)
    assert batch_ns(exposed) == 9 * 30 + 100


def test_costs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="links has 2 costs for 2 stages"):
        simulate(generate("gpipe", 2, 2, 1), COST, [LinkCost(), LinkCost()])
    with pytest.raises(ValueError, match=r"a reduction of stages \(0, 2\), but there are 2"):
        simulate(generate("gpipe", 2, 2, 1), COST, None, None, [SharedReduction((0, 2))])
