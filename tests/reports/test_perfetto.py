import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from twobw import Pipeline
from twobw.core.costs import LinkCost, StageCost
from twobw.core.generators import generate
from twobw.core.ops import Op, OpKind
from twobw.core.simulator import simulate
from twobw.core.timeline import Span, Timeline
from twobw.reports.perfetto import chrome_trace, load_timeline, timeline_of


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


def a_simulated_timeline() -> Timeline:
    stage, link = StageCost(1_000_001, 2_000_003, 500, 900_000, 10**6), LinkCost(7, 11, 1e9)
    return simulate(generate("2bw", 3, 4, 3), stage, link)


def a_measured_timeline() -> Timeline:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    pipeline = Pipeline(layers, nn.functional.mse_loss, lambda named: torch.optim.SGD(named), pp=3)
    for _ in range(4):
        pipeline.train_step(torch.ones(4, 4), torch.ones(4, 4))
    pipeline.drain()
    timeline = pipeline.timeline()
    assert timeline is not None
    return timeline


@pytest.mark.parametrize("make", [a_simulated_timeline, a_measured_timeline])
def test_each_event_is_as_the_format_wants_it(make: Callable[[], Timeline]) -> None:
    """Complete events have name, time, duration, process and thread; those of a thread follow each
    other, since Perfetto drops what overlaps without nesting; every thread has a name."""
    trace = json.loads(json.dumps(chrome_trace(make()), allow_nan=False))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in spans:
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["args"]["version"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in threads.values():
        for one, next_one in pairwise(sorted(events, key=lambda event: event["ts"])):
            assert one["ts"] + one["dur"] <= next_one["ts"] + 1e-6
    named = {
        (event["pid"], event["tid"])
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert named == set(threads)
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}


@pytest.mark.parametrize("source", ["simulated", "measured"])
def test_a_trace_reads_back(source: Any, tmp_path: Path) -> None:
    spans = a_simulated_timeline().spans
    timeline = Timeline(spans, source)
    path = tmp_path / "timeline.json"
    later = Timeline(
        tuple(Span(s.op, s.rank, s.lane, s.start_ns + 10**15, s.end_ns + 10**15) for s in spans),
        source,
    )
    path.write_text(json.dumps(chrome_trace(later)))
    first = min(span.start_ns for span in spans)
    assert first == 0
    assert load_timeline(path) == timeline


def trace_with(**wrong: Any) -> dict[str, Any]:
    trace = chrome_trace(a_simulated_timeline())
    next(event for event in trace["traceEvents"] if event["ph"] == "X").update(wrong)
    return trace


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([], "not as twobw writes it"),
        ({"traceEvents": [{"ph": "X", "pid": 0}], "otherData": {}}, "KeyError: 'args'"),
        (trace_with(cat=7), "AttributeError: 'int' object"),
        (trace_with(ts=float("inf")), "OverflowError: cannot convert"),
        (trace_with(ts="soon"), "TypeError"),
        (trace_with(tid=9), "KeyError"),
        ({"traceEvents": [], "otherData": {"source": "guessed"}}, "its source is 'guessed'"),
    ],
)
def test_other_traces_are_refused(trace: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline_of(trace)


def test_a_file_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"timeline\.json is no timeline: Expecting"):
        load_timeline(path)
