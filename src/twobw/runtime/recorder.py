"""`Recorder`: what a rank did and when, bounded however long the run."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Sequence

from twobw.core.ops import Op, OpKind
from twobw.core.timeline import COMPUTE_LANE, Span

MAX_SPANS = 4096


class Recorder:
    """Keeps the last `MAX_SPANS` spans, and the busy time since `take_busy_fraction` was called.

    Times are of the system-wide monotonic clock, so that ranks of one machine can be compared.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._window_start_ns = time.monotonic_ns()
        self._busy_ns = 0
        self.last_op: Op | None = None

    def record(self, op: Op, start_ns: int, end_ns: int) -> None:
        """Note that ``op`` ran from ``start_ns`` to ``end_ns``."""
        self._spans.append(Span(op, self._rank, lane_of(op), start_ns, end_ns))
        self.last_op = op
        if op.kind.is_compute:
            self._busy_ns += end_ns - start_ns

    def take_busy_fraction(self) -> float:
        """Share of the time since the last call (or the start) spent in forward, backward and
        update."""
        now_ns = time.monotonic_ns()
        fraction = self._busy_ns / max(now_ns - self._window_start_ns, 1)
        self._window_start_ns, self._busy_ns = now_ns, 0
        return fraction

    def forget(self) -> None:
        """Drop the spans kept."""
        self._spans.clear()

    def spans(self) -> list[Span]:
        """The spans kept, oldest first."""
        return list(self._spans)


def lane_of(op: Op) -> str:
    """The lane of `Span` that an op occupies, where every stage has a rank of its own."""
    match op.kind:
        case OpKind.SEND_ACTIVATION:
            return f"send {op.stage + 1}"
        case OpKind.RECV_GRADIENT:
            return f"recv {op.stage + 1}"
        case OpKind.SEND_GRADIENT:
            return f"send {op.stage - 1}"
        case OpKind.RECV_ACTIVATION:
            return f"recv {op.stage - 1}"
        case OpKind.REDUCE:
            return "reduce"
        case _:
            return COMPUTE_LANE


def peak_bytes() -> float:
    """The most memory this process ever had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


SPAN_LENGTH = 8
_KINDS = list(OpKind)


def span_numbers(span: Span) -> list[int]:
    """A span as integers, to be gathered."""
    op = span.op
    kind = _KINDS.index(op.kind)
    times = (span.start_ns, span.end_ns)
    return [span.rank, kind, op.stage, op.microbatch, op.batch, op.version, *times]


def span_of(numbers: Sequence[int]) -> Span:
    """The inverse of `span_numbers`."""
    rank, kind, stage, microbatch, batch, version, start_ns, end_ns = numbers
    op = Op(_KINDS[kind], stage, microbatch, batch, version)
    return Span(op, rank, lane_of(op), start_ns, end_ns)
