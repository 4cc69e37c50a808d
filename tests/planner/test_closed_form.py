from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twobw.core.costs import LinkCost, PipelineCost, StageCost
from twobw.core.steady import steady_state
from twobw.planner.closed_form import PaperStage, Sizes, estimate_ns, paper_ns
from twobw.planner.configuration import Configuration

nanoseconds = st.integers(1, 50)


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh", "paci", "1f1b", "gpipe", "no-pipeline"])
@given(p=st.integers(1, 5), m=st.integers(1, 8), f=nanoseconds, b=nanoseconds, u=nanoseconds)
def test_equal_stages_and_free_links_are_exact(
    schedule: str, p: int, m: int, f: int, b: int, u: int
) -> None:
    m += max(p - 2, 0)
    sizes = Sizes(f + b, p * (f + b), 0, u, 0)
    configuration = Configuration(p, 1, 1, m, schedule)
    exact = steady_state(schedule, m, PipelineCost.of(p, StageCost(f, b, u))).period_ns
    assert estimate_ns(configuration, sizes, overlaps=True) == pytest.approx(float(exact), rel=0.15)
    if schedule not in ("1f1b", "gpipe"):
        without = Sizes(f + b, p * (f + b), 0, 0, 0)
        cost = PipelineCost.of(p, StageCost(f, b))
        period = steady_state(schedule, m, cost).period_ns
        assert estimate_ns(configuration, without, overlaps=True) == period


@pytest.mark.parametrize("p", [2, 4, 8])
def test_transfers(p: int) -> None:
    sizes = Sizes(300, p * 300, 30, 0, 0)
    exposed = estimate_ns(Configuration(p, 1, 1, 2 * p, "2bw"), sizes, overlaps=True)
    assert exposed == pytest.approx(2 * p * (300 + 60 * (p - 1) / p))
    more = Configuration(p, 1, 1, 2 * p, "2bw", extra_in_flight=1)
    assert estimate_ns(more, sizes, overlaps=True) == 2 * p * 300


def test_2bw_below_p_less_1() -> None:
    sizes = Sizes(30, 8 * 30, 0, 0, 0)
    assert estimate_ns(Configuration(8, 1, 1, 3, "2bw"), sizes, overlaps=True) == 7 * 30


def test_a_reduction_is_hidden_as_far_as_it_goes() -> None:
    sizes = Sizes(30, 60, 0, 0, 100)
    configuration = Configuration(2, 2, 1, 4, "2bw")
    assert estimate_ns(configuration, sizes, overlaps=True) == 120 + 10  # 3 slots hide 90
    assert estimate_ns(configuration, sizes, overlaps=False) == 220


def test_a_link_may_set_the_pace() -> None:
    cost = PipelineCost.of(3, StageCost(10, 20), LinkCost(50))
    exact = steady_state("2bw", 6, cost, extra_in_flight=2).period_ns
    configuration = Configuration(3, 1, 1, 6, "2bw", extra_in_flight=2)
    assert estimate_ns(configuration, Sizes(30, 90, 50, 0, 0), overlaps=True) == exact == 300


def test_the_papers_formula() -> None:
    stages = [PaperStage(100, 6, 0), PaperStage(90, 30, 0)]
    # 90 + 2 * 30 bytes at a byte a nanosecond
    assert paper_ns(stages, 4, depth_bytes_per_second=1e9, width_bytes_per_second=inf) == 4 * 150
    wide = [PaperStage(100, 6, 1000)] * 2
    # 1000 bytes over 4 microbatches take longer than a slot of 112
    assert paper_ns(wide, 4, depth_bytes_per_second=1e9, width_bytes_per_second=1e9) == 1000
    alone = [PaperStage(100, 6, 0)]
    assert paper_ns(alone, 4, depth_bytes_per_second=1e9, width_bytes_per_second=inf) == 400
