import signal
from pathlib import Path

import pytest

from twobw.training.failures import (
    Failure,
    describe,
    describe_exit,
    first_cause,
    is_lost_peer,
    last_words,
    read_failures,
    record_failure,
    record_termination,
)

OWN = Failure(2, 2, "ValueError: wrong", time_ns=50, lost_peer=False)
LOST = Failure(1, 1, "RuntimeError: Connection closed by peer", time_ns=20, lost_peer=True)
KILLED = Failure(3, 3, "ended by SIGKILL", time_ns=0, lost_peer=False)


def test_a_record_is_read_back(tmp_path: Path) -> None:
    written = record_failure(tmp_path, 1, 1, ValueError("wrong\nvalue"))
    assert read_failures(tmp_path, 3) == [written]
    assert written.reason == "ValueError: wrong\nvalue"
    assert not written.lost_peer


@pytest.mark.parametrize(
    ("records", "exits", "cause"),
    [
        ([LOST, OWN], [], OWN),  # whoever lost a peer is not the cause, though it ended first
        ([LOST], [KILLED], KILLED),
        ([OWN, LOST], [KILLED], OWN),
        ([LOST], [], LOST),
        ([], [], None),
    ],
)
def test_first_cause(records: list[Failure], exits: list[Failure], cause: Failure | None) -> None:
    assert first_cause(records, exits) == cause


def test_the_earliest_of_several_causes_counts() -> None:
    later = Failure(0, 0, "TypeError", time_ns=51, lost_peer=False)
    assert first_cause([later, OWN], []) == OWN


def test_a_lost_peer_is_seen_through_the_error_that_wraps_it() -> None:
    wrapped = RuntimeError("rank 0, stage 0, B3@1 failed")
    wrapped.__cause__ = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:143")
    assert is_lost_peer(wrapped)
    assert is_lost_peer(ConnectionResetError())
    assert not is_lost_peer(ValueError("wrong"))


def test_reasons() -> None:
    error = ValueError("wrong")
    error.add_note("on stage 1, in FORWARD of microbatch 22")
    assert describe(error) == "ValueError: wrong; on stage 1, in FORWARD of microbatch 22"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "ended by SIGSEGV"
    assert "memory" in describe_exit(-signal.SIGKILL)
    assert describe_exit(-250) == "ended by signal 250"


def test_a_rank_that_another_program_ends_leaves_who_it_was(tmp_path: Path) -> None:
    written = record_termination(tmp_path, 5, 2, 4711)
    assert written.reason == "ended by SIGTERM, which process 4711 sent"
    assert read_failures(tmp_path, 6) == [written]
    assert first_cause([LOST, written], []) == written


def test_last_words_end_with_rank_stage_and_reason() -> None:
    words = last_words(OWN, Path("runs/demo/rank2.log"))
    assert words.splitlines()[-1] == "twobw: rank 2 (stage 2) failed: ValueError: wrong"
    assert "runs/demo/rank2.log" in words
