"""Waits that take long, of stages that are threads."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor, nn

import twobw
from twobw.core.ops import Op, OpKind
from twobw.runtime.transport import TransportError
from twobw.runtime.watchdog import Activity, LocalBoard, StuckError, Watchdog


class Hanging(nn.Module):
    """From the third forward on it waits to be let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.calls = 0
        self.go_on = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.go_on.wait(20)
        return self.linear(x)


def test_a_stage_that_hangs_is_named_by_the_one_that_waits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hanging = Hanging()
    pipeline = twobw.Pipeline(
        [nn.Linear(4, 4), hanging],
        nn.functional.mse_loss,
        lambda named: torch.optim.SGD(named, lr=0.1),
        "1f1b",
        num_microbatches=2,
        pp=2,
        timeout=1.5,
    )
    batch = torch.ones(4, 4), torch.ones(4, 1)
    pipeline.train_step(*batch)
    pipeline.train_step(*batch)
    with pipeline, pytest.raises(StuckError) as caught:
        pipeline.drain()
    hanging.go_on.set()
    first, *ranks, last = str(caught.value).splitlines()
    assert first.startswith("waited 1.5 s (limit 1.5 s) for a gradient from rank 1")
    assert ranks[0].startswith("  rank 0 (stage 0): batch 1; last op ended SA")
    assert "in RG" in ranks[0]
    assert ranks[1].startswith("  rank 1 (stage 1): batch 1; last op ended")
    assert "in F2@1 (forward of microbatch 2) for 1." in ranks[1]
    assert last.startswith("  likely cause: rank 1 is slow: it is in F2@1")
    assert "on stage 0, in RECV_GRADIENT" in caught.value.__notes__[0]
    still = capfd.readouterr().err
    assert still.count("rank 0 (stage 0) still waits for a gradient from rank 1, for 0.") == 1


def watched(*ranks: int, limit: float = 0.2) -> list[Activity]:
    activities = [Activity(rank, rank, limit) for rank in ranks]
    Watchdog(activities, LocalBoard(activities), limit)
    return activities


def test_an_error_before_the_limit_is_a_lost_peer_and_no_report() -> None:
    activity, _ = watched(0, 1, limit=60)
    lost = pytest.raises(TransportError, match="lost a gradient from rank 1: closed")
    with lost as caught, activity.waiting("a gradient from", [1]):
        raise RuntimeError("closed\nat some line")
    assert not isinstance(caught.value, StuckError)
    assert activity.vitals(0).waits == ()


def test_another_threads_result_has_a_limit_and_keeps_its_errors() -> None:
    activity, _ = watched(0, 1)
    with pytest.raises(StuckError, match="for its own reduction"):
        activity.result(Future(), "its own reduction")
    failed: Future[None] = Future()
    failed.set_exception(KeyError("its own"))
    with pytest.raises(KeyError, match="its own"):
        activity.result(failed, "its own reduction")


def test_an_activity_knows_the_op_it_is_in_and_the_last_that_ended() -> None:
    activity, _ = watched(0, 1)
    reduce, forward = (Op(kind, 0, 3, 0, 1) for kind in (OpKind.REDUCE, OpKind.FORWARD))
    activity.begin(reduce)
    activity.begin(forward)
    activity.end(reduce)  # on the other thread, meanwhile
    told = activity.vitals(0)
    assert (told.ended, told.running) == (
        "R3@1 (reduce of microbatch 3)",
        "F3@1 (forward of microbatch 3)",
    )
    activity.end(forward)
    assert activity.vitals(0).running == ""


def test_waits_inside_a_wait_are_told_one_after_the_other() -> None:
    activity, _ = watched(0, 1)
    with activity.waiting("the loss from", [1]):
        with activity.waiting("a gradient from", [1]):
            assert activity.vitals(0).waits[0].what == "a gradient from"
        assert activity.vitals(0).waits[0].what == "the loss from"
        assert [wait.what for _, wait in activity.late(-1.0)] == ["the loss from"]
        assert activity.late(60.0) == []
