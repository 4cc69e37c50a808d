"""A `Timeline` in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes it. A rank
is a process of the trace, a lane a thread of it; times are microseconds from the first span.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twobw.core.ops import Op, OpKind
from twobw.core.timeline import Span, Timeline

# Colour names that the format reserves. Perfetto colours by name, which tells F from B as well.
_COLOURS = {
    OpKind.FORWARD: "thread_state_runnable",
    OpKind.BACKWARD: "thread_state_running",
    OpKind.UPDATE: "thread_state_iowait",
    OpKind.REDUCE: "rail_load",
}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a value to be written as JSON."""
    lanes = _lanes(timeline)
    start_ns = min((span.start_ns for span in timeline.spans), default=0)
    events = [
        event for (rank, lane), thread in lanes.items() for event in _names(rank, lane, thread)
    ]
    events += [_event(span, lanes[span.rank, span.lane], start_ns) for span in timeline.spans]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source},
    }


def load_timeline(path: Path) -> Timeline:
    """Read a file that holds a `chrome_trace`.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no such trace.
    """
    try:
        return timeline_of(json.loads(path.read_bytes()))
    except ValueError as error:  # of JSON and of Unicode, too
        raise ValueError(f"{path} is no timeline: {error}") from None


def timeline_of(trace: Any) -> Timeline:
    """The inverse of `chrome_trace`, but for the clock, which starts at the first span.

    Raises:
        ValueError: it is no trace of a timeline.
    """
    try:
        events = trace["traceEvents"]
        lanes = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        spans = tuple(_span(event, lanes) for event in events if event["ph"] == "X")
        source = trace["otherData"]["source"]
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"not as twobw writes it ({type(error).__name__}: {error})") from None
    if source not in ("simulated", "measured"):
        raise ValueError(f"its source is {source!r}, neither simulated nor measured")
    return Timeline(spans, source)


def _span(event: dict[str, Any], lanes: dict[tuple[int, int], str]) -> Span:
    args, rank = event["args"], int(event["pid"])
    places = (int(args[name]) for name in ("stage", "microbatch", "batch", "version"))
    op = Op(OpKind[event["cat"].upper()], *places)
    start_ns = round(event["ts"] * 1000)
    end_ns = start_ns + round(event["dur"] * 1000)
    return Span(op, rank, lanes[rank, event["tid"]], start_ns, end_ns)


def _lanes(timeline: Timeline) -> dict[tuple[int, str], int]:
    """A thread number for each rank's lane: the compute lane on top, the others by name."""
    pairs = sorted(
        {(span.rank, span.lane) for span in timeline.spans},
        key=lambda pair: (pair[0], pair[1] != "compute", pair[1]),
    )
    numbers: dict[tuple[int, str], int] = {}
    for rank, lane in pairs:
        numbers[rank, lane] = sum(1 for other, _ in numbers if other == rank)
    return numbers


def _names(rank: int, lane: str, thread: int) -> list[dict[str, Any]]:
    values = {
        "process_name": {"name": f"rank {rank}"},
        "process_sort_index": {"sort_index": rank},
        "thread_name": {"name": lane},
        "thread_sort_index": {"sort_index": thread},
    }
    return [
        {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}
        for name, args in values.items()
        if thread == 0 or name.startswith("thread")
    ]


def _event(span: Span, thread: int, origin_ns: int) -> dict[str, Any]:
    op = span.op
    event = {
        "ph": "X",
        "name": str(op),
        "cat": op.kind.name.lower(),
        "pid": span.rank,
        "tid": thread,
        "ts": (span.start_ns - origin_ns) / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {
            "stage": op.stage,
            "batch": op.batch,
            "microbatch": op.microbatch,
            "version": op.version,
        },
    }
    if op.kind in _COLOURS:
        event["cname"] = _COLOURS[op.kind]
    return event
