"""One configuration judged by itself, and what closed forms know of ties."""

import pytest

from tests.planner.support import cluster, layer, profile
from twobw.planner.candidates import Candidates
from twobw.planner.configuration import Configuration, Training
from twobw.planner.plan import Plan
from twobw.planner.search import Rejection, find_plan, find_plans
from twobw.profiler.profile import ModelProfile, TieProfile

MILLION = 10**6


def tied(*layers: int) -> ModelProfile:
    block = layer(num_parameters=MILLION, handed_bytes=1000)
    ties = (TieProfile(layers=layers, num_parameters=MILLION),) if layers else ()
    return profile([block], [0] * 4, ties=ties)


def test_one_configuration_is_judged_as_the_search_judges_it() -> None:
    best = find_plans(tied(0, 3), cluster(4), Training(8), top=1, schedules=["1f1b"]).plans[0]
    configuration = Configuration(best.pp, best.dp, 1, best.num_microbatches, "1f1b")
    found = find_plan(tied(0, 3), cluster(4), Training(8), configuration)
    assert isinstance(found, Plan)
    assert (found.batch_ns, found.split) == (best.batch_ns, best.split)


def test_one_that_does_not_fit_says_what_it_needs() -> None:
    found = find_plan(
        tied(), cluster(4, memory=MILLION), Training(4), Configuration(2, 1, 1, 4, "2bw")
    )
    assert isinstance(found, Rejection)
    # two layers of a million parameters: 16 bytes each, and a second version's 4
    assert str(found) == "pp=2: stage 0 needs 40.0 MB of 1.0 (dp=1 2bw b=1 m=4)"
    assert 40 * MILLION <= found.needed_bytes < 41 * MILLION


@pytest.mark.parametrize(
    ("layers", "pp", "more_ns"),
    [((0, 3), 4, 4000), ((0, 3), 2, 4000), ((0, 1), 2, 0), ((0, 1), 4, 4000)],
)
def test_a_tie_that_must_be_reduced_counts_in_the_estimate(
    layers: tuple[int, ...], pp: int, more_ns: int
) -> None:
    """Two stages send each other 4 MB, all of it twice by halves, at 1 TB/s."""
    configuration = Configuration(pp, 1, 1, 8, "1f1b")
    with_tie, without = (
        Candidates(model, cluster(4), Training(8)).estimate_ns(configuration)
        for model in (tied(*layers), tied())
    )
    assert with_tie - without == more_ns
