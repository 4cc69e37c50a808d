import json

from twobw.core.ops import Op, OpKind
from twobw.core.timeline import Span, Timeline
from twobw.reports.perfetto import chrome_trace


def test_trace_of_two_ranks() -> None:
    forward = Op(OpKind.FORWARD, stage=1, microbatch=3, batch=1, version=1)
    send = Op(OpKind.SEND_GRADIENT, stage=1, microbatch=3, batch=1, version=1)
    update = Op(OpKind.UPDATE, stage=0, microbatch=1, batch=0, version=1)
    timeline = Timeline(
        (
            Span(forward, rank=1, lane="compute", start_ns=5_000_000, end_ns=5_002_500),
            Span(send, rank=1, lane="send 0", start_ns=5_002_500, end_ns=5_003_000),
            Span(update, rank=0, lane="compute", start_ns=5_001_000, end_ns=5_002_000),
        ),
        source="measured",
    )
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    assert trace["otherData"] == {"source": "measured"}
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert {(e["pid"], e["args"]["name"]) for e in names if e["name"] == "process_name"} == {
        (0, "rank 0"),
        (1, "rank 1"),
    }
    assert {
        (e["pid"], e["tid"], e["args"]["name"]) for e in names if e["name"] == "thread_name"
    } == {(0, 0, "compute"), (1, 0, "compute"), (1, 1, "send 0")}

    spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert set(spans) == {"F3@1", "SG3@1", "U1@1"}
    shown = spans["F3@1"]
    assert (shown["pid"], shown["tid"], shown["cat"]) == (1, 0, "forward")
    assert (shown["ts"], shown["dur"]) == (0.0, 2.5)  # microseconds from the first span
    assert shown["args"] == {"stage": 1, "batch": 1, "microbatch": 3, "version": 1}
    assert (spans["SG3@1"]["tid"], spans["SG3@1"]["ts"]) == (1, 2.5)
    assert (spans["U1@1"]["pid"], spans["U1@1"]["ts"], spans["U1@1"]["dur"]) == (0, 1.0, 1.0)


def test_an_empty_timeline_is_an_empty_trace() -> None:
    assert chrome_trace(Timeline((), source="measured"))["traceEvents"] == []
