"""Why a run died: each failing rank leaves a record, and the launcher names the first cause.

When one rank dies its neighbours fail too, within milliseconds, since their connections break; what
the user needs is the rank that died first. torch's own record has whole seconds and cannot tell.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from twobw.training.run_folder import failure_path, write_json

# What gloo, NCCL and torch's store say in the rank that is left behind.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "connection refused",
    "remote process exited",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's end.

    Attributes:
        rank: the rank that failed.
        stage: its stage of the model.
        reason: as text, one line or more.
        time_ns: when, on the machine's clock (nanoseconds since 1970).
        lost_peer: whether the rank failed only because it lost another.
    """

    rank: int
    stage: int
    reason: str
    time_ns: int
    lost_peer: bool


def describe(error: BaseException) -> str:
    """The error as one text: its type, its message, and the notes that say where it was, after
    the message's first line."""
    first, *more = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    notes = getattr(error, "__notes__", [])
    return "\n".join(["; ".join([f"{name}: {first}" if first else name, *notes]), *more])


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error, or one it came from, is a connection that another rank's end broke."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError):
            return True
        message = str(seen).lower()
        if any(sign in message for sign in _LOST_PEER):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def record_failure(folder: Path, rank: int, stage: int, error: BaseException) -> Failure:
    """Leave the reason of this rank's end in the run's folder, and return it."""
    return _record(
        folder, Failure(rank, stage, describe(error), time.time_ns(), is_lost_peer(error))
    )


def record_termination(folder: Path, rank: int, stage: int, sender: int) -> Failure:
    """Leave in the run's folder that the process ``sender`` ends this rank by SIGTERM."""
    reason = f"{describe_exit(-signal.SIGTERM)}, which process {sender} sent"
    return _record(folder, Failure(rank, stage, reason, time.time_ns(), lost_peer=False))


def _record(folder: Path, failure: Failure) -> Failure:
    write_json(failure_path(folder, failure.rank), asdict(failure))
    return failure


def read_failures(folder: Path, num_ranks: int) -> list[Failure]:
    """The records that the ranks left, by rank."""
    paths = (failure_path(folder, rank) for rank in range(num_ranks))
    return [Failure(**json.loads(path.read_text("utf-8"))) for path in paths if path.is_file()]


def describe_exit(exit_code: int) -> str:
    """What an exit code that came without a record says; negative is the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (the kernel does that when memory runs out)" if exit_code == -signal.SIGKILL else ""
    return f"ended by {name}{hint}"


def first_cause(records: list[Failure], exits: list[Failure]) -> Failure | None:
    """The failure that brought the others about.

    Args:
        records: what ranks wrote before they ended.
        exits: ranks that ended without a record, as the launcher saw them, those it ended itself
            left out.

    A rank that raised something of its own comes first, then one that was killed, then one that
    lost its peer; within each the earliest.
    """
    own = [record for record in records if not record.lost_peer]
    lost = [record for record in records if record.lost_peer]
    for group in (own, exits, lost):
        if group:
            return min(group, key=lambda failure: failure.time_ns)
    return None


def last_words(failure: Failure, log: Path) -> str:
    """What the user reads last: where to read more, then rank, stage and reason."""
    return (
        f"the log of rank {failure.rank} is {log}\n"
        f"twobw: rank {failure.rank} (stage {failure.stage}) failed: {failure.reason}"
    )
