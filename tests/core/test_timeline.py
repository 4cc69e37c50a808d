from twobw.core.ops import Op, OpKind, parse_op
from twobw.core.timeline import Span, Timeline


def span(text: str, start_ns: int, end_ns: int, *, rank: int = 0, lane: str = "compute") -> Span:
    return Span(parse_op(text, stage=rank, num_microbatches=2), rank, lane, start_ns, end_ns)


TIMELINE = Timeline(
    (
        span("B1@0", 160, 190),
        span("F2@0", 130, 140),
        span("U1@1", 190, 195),
        span("F1@0", 100, 110),
        span("RG1@0", 140, 160, lane="recv 1"),
        span("F2@0", 150, 200, rank=1),
    ),
    "measured",
)


def test_an_empty_timeline() -> None:
    empty = Timeline((), "measured")
    assert empty.makespan_ns == 0
    assert empty.busy_fraction(0) == 0.0
    assert empty.ranks == []
    assert empty.peak_in_flight() == {}


def test_times_count_from_the_first_start() -> None:
    assert TIMELINE.makespan_ns == 100
    assert TIMELINE.ranks == [0, 1]
    assert span("F0@0", 3, 7).duration_ns == 4


def test_busy_is_forward_backward_and_update_without_waits() -> None:
    assert TIMELINE.busy_ns(0) == 10 + 10 + 30 + 5
    assert TIMELINE.busy_fraction(0) == 0.55
    assert TIMELINE.busy_fraction(1) == 0.5


def test_spans_of_a_rank_come_by_start() -> None:
    assert [str(s.op) for s in TIMELINE.spans_of(0)] == ["F1@0", "F2@0", "RG1@0", "B1@0", "U1@1"]


def test_a_batch_ends_with_its_last_backward_on_any_rank() -> None:
    spans = (
        span("B0@0", 10, 20),
        span("B1@0", 20, 30),
        span("B1@0", 12, 14, rank=1),
        span("B2@0", 40, 50),
        span("U1@1", 60, 70),
    )
    assert Timeline(spans, "simulated").batch_ends_ns() == {0: 30, 1: 50}


def test_microbatches_begun_before_the_timeline_count_from_its_start() -> None:
    ops = [("B0@0", 0), ("F3@0", 1), ("B1@0", 2), ("B2@0", 3), ("B3@0", 4)]
    timeline = Timeline(tuple(span(text, at, at + 1) for text, at in ops), "measured")
    assert timeline.peak_in_flight() == {0: 3}


def test_an_op_of_no_time_stays_before_its_follower() -> None:
    update = Span(Op(OpKind.UPDATE, 0, 1, 0, 1), 0, "compute", 5, 5)
    forward = span("F2@0", 5, 9)
    assert Timeline((forward, update), "simulated").spans_of(0) == [update, forward]
