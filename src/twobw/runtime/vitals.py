"""What ranks tell of themselves, and what can be read from it when one waits too long. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from twobw.core.ops import Op

SILENT_BEATS = 4
"""A rank that has not told anything for so many beats is silent: stopped, ended or cut off."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait under way.

    Attributes:
        what: for what, up to the peers: ``"an activation from"``.
        peers: global ranks that can end it; none if it waits for another thread of its own rank.
        seconds: how long it has lasted.
    """

    what: str
    peers: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.what} {ranks_text(self.peers)}" if self.peers else self.what


@dataclass(frozen=True, slots=True)
class Vitals:
    """One rank at one moment. Seconds are up to that moment, by the rank's own clock.

    Attributes:
        rank: global.
        stage: its stage.
        host: name of its machine.
        pid: its process.
        beat: counts these messages.
        batch: the newest that it has begun; -1 before the first.
        ended: the last op that ended, in its text form; empty before the first.
        ended_s: since when.
        running: the op it is in; empty between calls of the pipeline.
        running_s: since when.
        waits: those under way, that of the stage's own thread first.
    """

    rank: int
    stage: int
    host: str
    pid: int
    beat: int
    batch: int
    ended: str
    ended_s: float
    running: str
    running_s: float
    waits: tuple[Wait, ...] = ()

    @property
    def wait(self) -> Wait | None:
        """The wait that others can end, if there is one."""
        return next((wait for wait in self.waits if wait.peers), None)

    def to_json(self) -> str:
        """As text, for other processes."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str | bytes) -> Vitals:
        """The inverse of `to_json`."""
        values = json.loads(text)
        waits = tuple(Wait(w["what"], tuple(w["peers"]), w["seconds"]) for w in values["waits"])
        return Vitals(**(values | {"waits": waits}))


@dataclass(frozen=True, slots=True)
class Sighting:
    """What another rank knows of one.

    Attributes:
        vitals: the last that was heard.
        silent_s: since when nothing new has been.
        is_silent: whether that is too long for a process that runs.
    """

    vitals: Vitals
    silent_s: float = 0.0
    is_silent: bool = False


Probe = Callable[[Vitals], str]
"""What the machine says of a rank's process: ``"stopped"``, ``"gone"``, ``"running"``, or
``"elsewhere"`` where it is on another machine."""


def op_text(op: Op) -> str:
    """``RA9@2 (recv_activation of microbatch 9)``."""
    return f"{op} ({op.kind.name.lower()} of microbatch {op.microbatch})"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2``."""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def status_line(rank: int, sighting: Sighting | None) -> str:
    """What is known of one rank, in a line."""
    if sighting is None:
        return f"rank {rank}: has never been heard of"
    vitals = sighting.vitals
    ended = f"last op ended {vitals.ended}, {vitals.ended_s:.1f} s ago"
    parts = [
        f"batch {vitals.batch}" if vitals.batch >= 0 else "before its first batch",
        ended if vitals.ended else "no op has ended",
    ]
    if vitals.running:
        parts.append(f"in {vitals.running} for {vitals.running_s:.1f} s")
    else:
        parts.append("between calls of the pipeline")
    parts += [f"waits for {wait} since {wait.seconds:.1f} s" for wait in vitals.waits]
    silence = f"no sign of life for {sighting.silent_s:.1f} s; then: " if sighting.is_silent else ""
    return f"rank {rank} (stage {vitals.stage}): {silence}{'; '.join(parts)}"


def likely_cause(waiter: int, sightings: Mapping[int, Sighting | None], probe: Probe) -> str:
    """Why ``waiter`` waits: from rank to rank along the waits, up to one that does not wait.

    Args:
        waiter: a rank that waits for others.
        sightings: of every rank; ``None`` for one that was never heard of.
        probe: asks the machine about a process.
    """
    path = [waiter]
    while True:
        seen = sightings[path[-1]]
        wait = None if seen is None else seen.vitals.wait
        if wait is None:
            return _one_rank(path[-1], seen, probe)
        rank = _culprit(path[-1], wait, sightings)
        if rank is None:
            return "all of them are in it: the link between them is cut, or very slow"
        sighting = sightings[rank]
        if sighting is None or sighting.is_silent:
            return _one_rank(rank, sighting, probe)
        if rank in path:
            return _circle([s.vitals for r in path[path.index(rank) :] if (s := sightings[r])])
        path.append(rank)


def _culprit(rank: int, wait: Wait, sightings: Mapping[int, Sighting | None]) -> int | None:
    """Of the ranks that ``rank`` waits for, the one that is to blame most; ``None`` if all wait
    for the same."""

    def blame(peer: int) -> int:
        sighting = sightings[peer]
        if sighting is None or sighting.is_silent:
            return 3
        theirs = sighting.vitals.wait
        if theirs is None:
            return 2
        return 0 if (theirs.what, theirs.peers) == (wait.what, wait.peers) else 1

    others = [peer for peer in wait.peers if peer != rank]
    worst = max(others, key=blame, default=None)
    return None if worst is None or blame(worst) == 0 else worst


def _one_rank(rank: int, sighting: Sighting | None, probe: Probe) -> str:
    """What is the matter with a rank that does not wait for others."""
    if sighting is None:
        return f"rank {rank} has never come; its log or its machine tells why"
    vitals = sighting.vitals
    name = f"process {vitals.pid} of rank {rank}"
    if not sighting.is_silent:
        if vitals.waits:
            return f"rank {rank} is slow: it waits for {vitals.waits[0]}"
        if vitals.running:
            return f"rank {rank} is slow: it is in {vitals.running} for {vitals.running_s:.1f} s"
        return (
            f"rank {rank} is busy outside of the pipeline (data, files) since its last op, or does "
            "not make the calls that the others make"
        )
    match probe(vitals):
        case "stopped":
            return f"{name} is stopped (SIGSTOP); `kill -CONT {vitals.pid}` lets it go on"
        case "gone":
            return f"{name} has died"
        case "running":
            return f"{name} is there but gives no sign of life: it hangs, or its machine is overrun"
        case _:
            return f"{name} on {vitals.host} has died or is stopped, or the network to it is cut"


def _circle(circle: Sequence[Vitals]) -> str:
    """Ranks that wait for each other."""
    who = " and ".join(f"rank {vitals.rank} for {vitals.wait}" for vitals in circle)
    batches = {vitals.rank: vitals.batch for vitals in circle}
    if len(set(batches.values())) > 1:
        where = ", ".join(f"rank {rank} at batch {batch}" for rank, batch in batches.items())
        return (
            f"the ranks are at different batches ({where}) and wait for each other; every rank "
            "must make the same calls, with as many batches"
        )
    if len({_shape(vitals) for vitals in circle}) > 1 and all(map(_shape, circle)):
        return f"shapes disagree: {who}"
    return (
        f"they wait for each other ({who}): the ranks disagree on what comes next, or what was "
        "sent has not arrived"
    )


def _shape(vitals: Vitals) -> str:
    """The shape that a rank's wait names, in brackets; empty if it names none."""
    what = vitals.wait.what if vitals.wait else ""
    return what[what.index("[") : what.index("]")] if "[" in what and "]" in what else ""
