"""`Recorder`: what a rank did and when, bounded however long the run."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from twobw.core.ops import Op, OpKind
from twobw.core.timeline import COMPUTE_LANE, Span

MAX_SPANS = 4096


class Recorder:
    """Keeps the last `MAX_SPANS` spans, and the busy time since `take_busy_fraction` was called.

    Times are of the system-wide monotonic clock, so that ranks of one machine can be compared. On
    a GPU they are those of CUDA events in the current stream, set off from that clock once.

    Args:
        rank: for the spans.
        device: where the ops run.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._busy_ns = 0
        self._origin: torch.cuda.Event | None = None
        self._pending: deque[tuple[Op, torch.cuda.Event, torch.cuda.Event]] = deque()
        if device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin.synchronize()
        self._origin_ns = self._window_start_ns = time.monotonic_ns()

    @contextmanager
    def timed(self, op: Op) -> Iterator[None]:
        """Note when ``op``, which runs meanwhile, starts and ends."""
        if self._origin is None:
            start_ns = time.monotonic_ns()
            yield
            self._add(op, start_ns, time.monotonic_ns())
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._pending.append((op, start, end))

    def _add(self, op: Op, start_ns: int, end_ns: int) -> None:
        self._spans.append(Span(op, self._rank, lane_of(op), start_ns, end_ns))
        if op.kind.is_compute:
            self._busy_ns += end_ns - start_ns

    def _add_ended(self) -> None:
        """Take in the ops that the GPU has ended by now."""
        while self._pending and self._pending[0][2].query():
            op, start, end = self._pending.popleft()
            assert self._origin is not None
            self._add(op, *(self._time_ns(self._origin, event) for event in (start, end)))

    def _time_ns(self, origin: torch.cuda.Event, event: torch.cuda.Event) -> int:
        return self._origin_ns + int(origin.elapsed_time(event) * 1e6)

    def take_busy_fraction(self) -> float:
        """Share of the time since the last call (or the start) spent in forward, backward and
        update."""
        self._add_ended()
        now_ns = time.monotonic_ns()
        fraction = self._busy_ns / max(now_ns - self._window_start_ns, 1)
        self._window_start_ns, self._busy_ns = now_ns, 0
        return fraction

    def forget(self) -> None:
        """Drop the spans kept."""
        self._pending.clear()
        self._spans.clear()

    def spans(self) -> list[Span]:
        """The spans kept, oldest first."""
        if self._pending:
            torch.cuda.synchronize()
            self._add_ended()
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


def peak_bytes(device: torch.device) -> float:
    """The most memory ever in use for training: allocated on a GPU, else resident in this process
    beyond what it was when this module was loaded."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return _most_resident_bytes() - _BASE_BYTES


def _most_resident_bytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


_BASE_BYTES = _most_resident_bytes()  # interpreter and libraries


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
