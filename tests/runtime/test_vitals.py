"""What is read from what ranks tell of themselves."""

from dataclasses import replace

import pytest

from twobw.runtime.vitals import Sighting, Vitals, Wait, likely_cause, status_line


def vitals(rank: int, *waits: Wait, batch: int = 3, running: str = "") -> Vitals:
    return Vitals(rank, rank, "here", 100 + rank, 7, batch, "B8@2", 4.0, running, 2.5, waits)


def wait_for(*peers: int, what: str = "an activation from") -> Wait:
    return Wait(what, peers, 5.0)


def seen(*all_vitals: Vitals, silent: tuple[int, ...] = ()) -> dict[int, Sighting | None]:
    return {v.rank: Sighting(v, 6.0, is_silent=v.rank in silent) for v in all_vitals}


def cause(sightings: dict[int, Sighting | None], waiter: int = 0, process: str = "running") -> str:
    return likely_cause(waiter, sightings, lambda _: process)


def test_vitals_are_read_back() -> None:
    told = vitals(2, wait_for(0, 1), Wait("its own reduction", (), 0.5), running="F9@2")
    assert Vitals.of_json(told.to_json()) == told
    assert told.wait == wait_for(0, 1)


def test_a_line_tells_batch_last_op_op_and_waits() -> None:
    told = vitals(1, wait_for(0), running="RA9@2 (recv_activation of microbatch 9)")
    assert status_line(1, Sighting(told)) == (
        "rank 1 (stage 1): batch 3; last op ended B8@2, 4.0 s ago; in RA9@2 (recv_activation of "
        "microbatch 9) for 2.5 s; waits for an activation from rank 0 since 5.0 s"
    )
    new = replace(told, batch=-1, ended="", running="", waits=())
    assert status_line(1, Sighting(new, 6.0, is_silent=True)) == (
        "rank 1 (stage 1): no sign of life for 6.0 s; then: before its first batch; no op has "
        "ended; between calls of the pipeline"
    )
    assert status_line(4, None) == "rank 4: has never been heard of"


@pytest.mark.parametrize(
    ("process", "words"),
    [
        ("stopped", "process 102 of rank 2 is stopped (SIGSTOP); `kill -CONT 102`"),
        ("gone", "process 102 of rank 2 has died"),
        ("running", "process 102 of rank 2 is there but gives no sign of life"),
        ("elsewhere", "process 102 of rank 2 on here has died or is stopped, or the network"),
    ],
)
def test_the_silent_rank_at_the_end_of_the_chain_is_the_cause(process: str, words: str) -> None:
    chain = seen(vitals(0, wait_for(1)), vitals(1, wait_for(2)), vitals(2), silent=(2,))
    assert cause(chain, process=process).startswith(words)


def test_a_rank_that_computes_is_slow() -> None:
    chain = seen(vitals(0, wait_for(1)), vitals(1, running="F9@2"))
    assert cause(chain) == "rank 1 is slow: it is in F9@2 for 2.5 s"


def test_a_rank_outside_of_the_pipeline_is_said_to_be_there() -> None:
    assert cause(seen(vitals(0, wait_for(1)), vitals(1))).startswith("rank 1 is busy outside")


def test_a_rank_that_never_came_is_named() -> None:
    sightings = seen(vitals(0, wait_for(1, 2)), vitals(1, wait_for(0, 2))) | {2: None}
    assert cause(sightings).startswith("rank 2 has never come")


def test_ranks_at_different_batches_that_wait_for_each_other() -> None:
    circle = seen(vitals(0, wait_for(1), batch=4), vitals(1, wait_for(0), batch=3))
    assert cause(circle).startswith(
        "the ranks are at different batches (rank 0 at batch 4, rank 1 at batch 3)"
    )


def test_ranks_of_one_batch_that_wait_for_each_other() -> None:
    circle = seen(vitals(0, wait_for(1)), vitals(1, wait_for(0, what="a batch's loss from")))
    assert cause(circle) == (
        "they wait for each other (rank 0 for an activation from rank 1 and rank 1 for a batch's "
        "loss from rank 0): the ranks disagree on what comes next, or what was sent has not arrived"
    )


def test_members_of_a_group_with_other_shapes() -> None:
    a, b = (wait_for(0, 1, what=f"the sum of float32[{n}] over") for n in (10, 12))
    assert cause(seen(vitals(0, a), vitals(1, b))) == (
        "shapes disagree: rank 0 for the sum of float32[10] over ranks 0, 1 and rank 1 for the sum "
        "of float32[12] over ranks 0, 1"
    )


def test_the_one_member_that_is_missing_is_the_cause() -> None:
    group = wait_for(0, 1, 2, what="the sum of float32[10] over")
    members = seen(vitals(0, group), vitals(1, group), vitals(2, running="F9@2"))
    assert cause(members).startswith("rank 2 is slow")
    all_in = seen(*(vitals(rank, group) for rank in range(3)))
    assert cause(all_in).startswith("all of them are in it")
