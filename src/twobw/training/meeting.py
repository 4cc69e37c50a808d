"""How the ranks of a run meet, before there is a process group: who is missing is named, and who
has another config or another version is refused.

They write into the launcher's store (torch's `TCPStore`), each its own card, as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from twobw import __version__
from twobw.config import Config, ConfigError
from twobw.config.toml_text import toml_text
from twobw.runtime.vitals import ranks_text
from twobw.training import loopback

_POLL_S = 0.05
_LEAVE_S = 5.0
_OF_EACH_RANK = frozenset({"run.folder", "training.num_threads"})

Card = Mapping[str, object]
"""What a rank says of itself: versions, and settings by dotted name."""


class MeetingError(RuntimeError):
    """Ranks that do not come together."""


def meet(config: Config, rank: int) -> Store:
    """Wait for all ranks of the run, and compare what they are about to do.

    Returns:
        The store they met in, for the process group.

    Raises:
        MeetingError: the store cannot be had, or some rank does not come within
            ``training.timeout_s``.
        ConfigError: ranks disagree about a setting or a version.
    """
    timeout = timedelta(seconds=config.training.timeout_s)
    store = open_store(rank, timeout)
    keys = [f"twobw/card/{other}" for other in range(config.num_ranks)]
    store.set(keys[rank], json.dumps(card_of(config)))
    deadline = time.monotonic() + config.training.timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise MeetingError(missing_text(missing, config))
        time.sleep(_POLL_S)
    problems = disagreements_of([json.loads(text) for text in store.multi_get(keys)])
    if problems:
        _leave_together(store, rank, config.num_ranks)
        raise ConfigError("the ranks disagree", problems)
    return store


def card_of(config: Config) -> dict[str, object]:
    """What this rank says of itself."""
    settings = {
        f"{section}.{key}": value
        for section, values in config.model_dump(mode="json").items()
        for key, value in values.items()
    }
    versions = {"the version of twobw": __version__, "the version of torch": torch.__version__}
    return versions | {k: v for k, v in settings.items() if k not in _OF_EACH_RANK}


def disagreements_of(cards: list[Card]) -> list[str]:
    """A line for each thing that is not the same on all ranks; cards by rank."""
    problems = []
    for name in dict.fromkeys(name for card in cards for name in card):
        holders: dict[str, list[int]] = {}
        for rank, card in enumerate(cards):
            text = toml_text(card[name]) if name in card else "unknown"
            holders.setdefault(text, []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in holders.items())
            problems.append(f"{name} is {values}; it must be the same everywhere")
    return problems


def missing_text(missing: list[int], config: Config) -> str:
    """Who did not come."""
    stages = sorted({config.parallel.grid.place(rank)[0] for rank in missing})
    word = "stage" if len(stages) == 1 else "stages"
    has, its = ("has", "its") if len(missing) == 1 else ("have", "their")
    return (
        f"{ranks_text(missing)} ({word} {', '.join(map(str, stages))}) {has} not come within "
        f"{config.training.timeout_s:g} s (training.timeout_s) of {config.num_ranks} ranks; "
        f"{its} log or machine tells why: not started, stopped, or without a way to this one"
    )


def open_store(rank: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT: the launcher's, or else rank 0's.

    Raises:
        MeetingError: it cannot be had.
    """
    address, port_text = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        port = int(port_text)
        if is_master and address in (loopback.ADDRESS, "localhost"):
            store = loopback.loopback_store(port)
        else:
            store = TCPStore(
                address, port, is_master=is_master, timeout=timeout, wait_for_workers=False
            )
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            raise MeetingError(
                f"MASTER_PORT = {port_text} is in use on this machine; end the other program, or "
                "start all ranks with another MASTER_PORT"
            ) from error
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise MeetingError(
            f"no meeting place at MASTER_ADDR = {address}, MASTER_PORT = {port_text}, where rank 0 "
            f"or the launcher must listen: {first_line}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"twobw-{attempt}", store)


def _leave_together(store: Store, rank: int, num_ranks: int) -> None:
    """Let the others read the cards before this rank, whose store it may be, ends."""
    keys = [f"twobw/read/{other}" for other in range(num_ranks)]
    with suppress(RuntimeError):
        store.set(keys[rank], "")
        store.wait(keys, timedelta(seconds=_LEAVE_S))
