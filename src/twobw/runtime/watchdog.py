"""`Watchdog`: sees the waits of this process's ranks, and says whom a long one waits for and why.

A rank's threads note what they are at in its `Activity`, an attribute an op. One daemon thread a
process reads that every few seconds and tells other processes by the process group's store; so the
report of a wait names what every rank was at, also of one that no longer answers.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import finalize

import torch.distributed as dist

from twobw.core.ops import Op
from twobw.runtime.transport import TransportError
from twobw.runtime.vitals import (
    SILENT_BEATS,
    Sighting,
    Vitals,
    Wait,
    likely_cause,
    op_text,
    status_line,
)

Result = TypeVar("Result")

_SEVERAL_WAITS = 3
_SHORTEST_BEAT_S, _LONGEST_BEAT_S = 0.01, 5.0
_LONGEST_PATIENCE_S = 40.0
_STORE_LIMIT_S = 2.0
_POLL_S = 0.02
_HOST = socket.gethostname()


class StuckError(TransportError):
    """A wait has reached its limit.

    Attributes:
        stopped: processes of this machine that were found stopped (SIGSTOP).
    """

    def __init__(self, message: str, stopped: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.stopped = tuple(stopped)


class Activity:
    """What one rank is at: set by its threads, read by the watchdog.

    Args:
        rank: global.
        stage: its stage.
        limit: seconds that a wait may last.

    Attributes:
        watchdog: who reports a wait at its limit; set when there is one.
        batch: the newest begun; -1 before the first.
        last_op: the last op that ended; ``None`` before the first.
    """

    def __init__(self, rank: int, stage: int, limit: float) -> None:
        self.rank = rank
        self.stage = stage
        self.limit = limit
        self.watchdog: Watchdog | None = None
        self.batch = -1
        self.last_op: Op | None = None
        self._op: Op | None = None
        self._ended = self._began = time.monotonic()
        self._waits: dict[int, tuple[str, tuple[int, ...], float]] = {}  # by thread

    def begin(self, op: Op) -> None:
        """The stage's thread begins an op."""
        self._op, self._began = op, time.monotonic()

    def end(self, op: Op) -> None:
        """An op has ended, on whatever thread."""
        self.last_op, self._ended = op, time.monotonic()
        if op is self._op:
            self._op = None

    @contextmanager
    def waiting(self, what: str, peers: Sequence[int]) -> Iterator[None]:
        """To be open while this thread waits for other ranks.

        Args:
            what: as in `Wait`.
            peers: as in `Wait`.

        Raises:
            TransportError: what waits has raised a RuntimeError or TimeoutError: a peer is gone
                or, as `StuckError`, the limit is reached.
        """
        since = time.monotonic()
        with self._noted(what, tuple(peers), since):
            try:
                yield
            except (RuntimeError, TimeoutError) as error:
                wait = Wait(what, tuple(peers), time.monotonic() - since)
                raise self._lost(wait, error) from error

    def result(self, future: Future[Result], what: str) -> Result:
        """What this rank's other thread makes; its errors are raised as they are.

        The waits in it have limits of their own. The one here is longer, for several of them in a
        row, and for a GPU that does not come to an end.

        Raises:
            StuckError: it takes too long.
        """
        if not future.done():
            since = time.monotonic()
            with self._noted(what, (), since):
                futures.wait([future], _SEVERAL_WAITS * self.limit)
                if not future.done():
                    seconds = time.monotonic() - since
                    raise self._lost(Wait(what, (), seconds), TimeoutError())
        return future.result()

    @contextmanager
    def _noted(self, what: str, peers: tuple[int, ...], since: float) -> Iterator[None]:
        thread = threading.get_ident()
        outer = self._waits.get(thread)
        self._waits[thread] = (what, peers, since)
        try:
            yield
        finally:
            if outer is None:
                del self._waits[thread]
            else:
                self._waits[thread] = outer

    def vitals(self, beat: int) -> Vitals:
        """What this rank is at now."""
        now, op, last = time.monotonic(), self._op, self.last_op
        waits = tuple(
            Wait(what, peers, now - since) for what, peers, since in list(self._waits.values())
        )
        return Vitals(
            rank=self.rank,
            stage=self.stage,
            host=_HOST,
            pid=os.getpid(),
            beat=beat,
            batch=self.batch,
            ended=op_text(last) if last else "",
            ended_s=now - self._ended,
            running=op_text(op) if op else "",
            running_s=now - self._began,
            waits=waits,
        )

    def late(self, patience_s: float) -> list[tuple[float, Wait]]:
        """The waits for others that have lasted longer, with the time that each began at."""
        now = time.monotonic()
        return [
            (since, Wait(what, peers, now - since))
            for what, peers, since in list(self._waits.values())
            if peers and now - since > patience_s
        ]

    def _lost(self, wait: Wait, error: Exception) -> TransportError:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        is_late = wait.seconds >= 0.9 * self.limit
        if not is_late or self.watchdog is None:
            return TransportError(f"lost {wait}: {first_line}")
        report, stopped = self.watchdog.report(self)
        return StuckError(
            f"waited {wait.seconds:.1f} s (limit {self.limit:g} s) for {wait}\n{report}", stopped
        )


class Board(Protocol):
    """Where ranks tell each other what they are at."""

    @property
    def ranks(self) -> Sequence[int]:
        """All of them."""
        ...

    def post(self, vitals: Vitals) -> None:
        """Tell."""
        ...

    def read(self) -> dict[int, Vitals]:
        """The last that each rank told."""
        ...


class StoreBoard:
    """A board in the store of a process group, through a connection of its own.

    Args:
        num_ranks: in the process group.
        name: of this board among others in the store; the same on every rank.
    """

    def __init__(self, num_ranks: int, name: str) -> None:
        self.ranks = range(num_ranks)
        self._keys = [f"twobw/{name}/{rank}" for rank in self.ranks]
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_LIMIT_S))

    def post(self, vitals: Vitals) -> None:
        """See `Board`."""
        self._store.set(self._keys[vitals.rank], vitals.to_json())

    def read(self) -> dict[int, Vitals]:
        """See `Board`."""
        if self._store.check(self._keys):
            there = list(self.ranks)
        else:
            there = [rank for rank in self.ranks if self._store.check([self._keys[rank]])]
        texts = self._store.multi_get([self._keys[rank] for rank in there])
        return dict(zip(there, map(Vitals.of_json, texts), strict=True))


class LocalBoard:
    """A board of ranks that are threads of this process."""

    def __init__(self, activities: Sequence[Activity]) -> None:
        self.ranks = [activity.rank for activity in activities]
        self._activities = activities

    def post(self, vitals: Vitals) -> None:
        """Nothing to do: who reads asks."""

    def read(self) -> dict[int, Vitals]:
        """See `Board`."""
        return {activity.rank: activity.vitals(0) for activity in self._activities}


class Watchdog:
    """Watches the ranks of this process.

    Args:
        activities: of the ranks of this process.
        board: where all ranks tell what they are at.
        limit: seconds that a wait may last; the beat and the patience follow from it.
    """

    def __init__(self, activities: Sequence[Activity], board: Board, limit: float) -> None:
        self._activities = activities
        self._board = board
        self._beat_s = min(max(limit / 20, _SHORTEST_BEAT_S), _LONGEST_BEAT_S)
        self._patience_s = min(limit / 3, _LONGEST_PATIENCE_S)
        self._limit = limit
        self._beat = 0
        self._heard: dict[int, tuple[Vitals, float]] = {}  # and when its beat was new
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._end: finalize[[threading.Event, threading.Thread], object] | None = None
        for activity in activities:
            activity.watchdog = self
        self._tell()

    def start(self, owner: object) -> None:
        """Begin to watch, until `close` or until ``owner`` is no longer used."""
        thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        thread.start()
        # also at exit: a daemon thread must not be inside the store when the interpreter ends
        self._end = finalize(owner, _end, self._stop, thread)

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._end is not None:
            self._end()

    def wait_for_all(self) -> None:
        """Wait until every rank has told something.

        Raises:
            TimeoutError: some has not, within the limit.
        """
        deadline = time.monotonic() + self._limit
        self._listen()
        while len(self._heard) < len(self._board.ranks):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_POLL_S)
            self._listen()

    def report(self, activity: Activity) -> tuple[str, list[int]]:
        """What every rank is at and the likely cause of ``activity``'s wait, as text; and the
        processes of this machine that are stopped."""
        self._listen()
        seen = {rank: self._sighting(rank) for rank in self._board.ranks}
        lines = [status_line(rank, sighting) for rank, sighting in seen.items()]
        lines.append(f"likely cause: {likely_cause(activity.rank, seen, probe)}")
        stopped = [
            sighting.vitals.pid
            for sighting in seen.values()
            if sighting and sighting.is_silent and probe(sighting.vitals) == "stopped"
        ]
        return "\n".join(f"  {line}" for line in lines), stopped

    def _run(self) -> None:
        told: set[float] = set()
        while not self._stop.wait(self._beat_s):
            self._tell()
            for activity in self._activities:
                late = activity.late(self._beat_s)
                if late:
                    self._listen()
                for since, wait in late:
                    if wait.seconds > self._patience_s and since not in told:
                        told.add(since)
                        self._say(activity, wait)

    def _say(self, activity: Activity, wait: Wait) -> None:
        report, _ = self.report(activity)
        sys.stderr.write(
            f"rank {activity.rank} (stage {activity.stage}) still waits for {wait}, for "
            f"{wait.seconds:.1f} s now (limit {activity.limit:g} s)\n{report}\n"
        )
        sys.stderr.flush()

    def _tell(self) -> None:
        """Post what this process's ranks are at."""
        self._beat += 1
        with suppress(RuntimeError):  # a store that is gone: others will see the silence
            for activity in self._activities:
                self._board.post(activity.vitals(self._beat))

    def _listen(self) -> None:
        """Read what all ranks are at; of this process's own, what they are at now."""
        if not self._lock.acquire(timeout=2 * _STORE_LIMIT_S):
            return  # the store hangs: what was heard before must do
        try:
            with suppress(RuntimeError):
                now = time.monotonic()
                for rank, vitals in self._board.read().items():
                    if rank not in self._heard or self._heard[rank][0].beat != vitals.beat:
                        self._heard[rank] = (vitals, now)
        finally:
            self._lock.release()

    def _sighting(self, rank: int) -> Sighting | None:
        for activity in self._activities:
            if activity.rank == rank:
                return Sighting(activity.vitals(self._beat))
        if rank not in self._heard:
            return None
        vitals, heard = self._heard[rank]
        silent_s = time.monotonic() - heard
        is_silent = silent_s > SILENT_BEATS * self._beat_s or probe(vitals) in ("stopped", "gone")
        return Sighting(vitals, silent_s, is_silent)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(2 * _STORE_LIMIT_S)


def probe(vitals: Vitals) -> str:
    """See `twobw.runtime.vitals.Probe`."""
    if vitals.host != _HOST or not Path("/proc/self").exists():
        return "elsewhere"
    try:
        stat = Path(f"/proc/{vitals.pid}/stat").read_text("utf-8")
    except OSError:
        return "gone"
    state = stat.rpartition(")")[2].split()[0]
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "running")
