"""Starts the ranks of a run on this machine through torch's launcher, and tells how they ended."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from twobw.config import Config
from twobw.training import loopback
from twobw.training.failures import (
    Failure,
    describe_exit,
    first_cause,
    last_words,
    read_failures,
)
from twobw.training.invocation import invocation
from twobw.training.resuming import OpenRun, open_run
from twobw.training.run_folder import (
    NO_FILES,
    SUMMARY,
    WEIGHTS,
    failure_of,
    failure_path,
    log_path,
)

_SHOW_CURSOR = "\x1b[?25h"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RankLogs(LogsSpecs):
    """Rank 0's standard output is ours; all else that ranks print goes to ``rank{r}.log``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank, as torch's launcher asks for them."""
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),  # of rank 0; the others join it to standard error
            stderrs={rank: str(log_path(self._folder, rank)) for rank in envs},
            error_files={rank: str(failure_path(self._folder, rank)) + ".torch" for rank in envs},
        )

    @property
    def root_log_dir(self) -> str:
        """Where the logs are."""
        return str(self._folder)


def launch(config: Config, files: Mapping[str, str] = NO_FILES, resumed: Path | None = None) -> int:
    """Train with ``pp * dp`` ranks on this machine; return the exit code of the command.

    The first Ctrl-C (or SIGTERM) lets the ranks finish the batch, drain and save; before training
    has begun it ends them, as a second does at any time. When a rank dies the others are ended,
    and the last line on standard error names the rank, its stage and the reason.

    Args:
        config: of the run.
        files: to be left in its folder, text by name.
        resumed: the folder of the run that goes on; ``None``: a new one.
    """
    run = open_run(config, files, resumed)
    folder = run.folder
    # Ranks of one machine meet on the loopback, whatever its name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.environ["OMP_NUM_THREADS"] = str(config.training.num_threads)
    # After Ctrl-C: waits inside the pipeline are bounded by timeout_s, and a second Ctrl-C does not
    # wait. Not by LaunchConfig, which knew no such limit at first: there ranks have 30 seconds.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(config.training.timeout_s) + 60)
    # torch's agent reports each death at length; the ranks' logs and our last words say it all.
    logging.disable(logging.CRITICAL)
    try:
        with _signals_forwarded():
            _run_agent(config, run)
    except ChildFailedError as error:
        cause = _cause(config, folder, _exits(error, config))
        assert cause is not None, "a rank that failed left a record or was seen to end"
        return _report(cause, folder)
    except SignalException:
        return _after_signal(config, folder)
    return _verdict(folder)


def _run_agent(config: Config, run: OpenRun) -> None:
    loopback.register()
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.num_ranks,
        logs_specs=RankLogs(run.folder),
        run_id=str(uuid4()),
        role="rank",
        rdzv_backend=loopback.BACKEND,
        local_addr=loopback.ADDRESS,
        max_restarts=0,
        # All others are handled by _signals_forwarded; the list must not be empty.
        signals_to_handle="SIGQUIT",
    )
    # -P: the current folder must not stand before the standard library, as it does under -m.
    worker = ["-P", "-m", "twobw.training.worker", str(run.folder), str(os.getpid()), invocation()]
    elastic_launch(launch_config, sys.executable)(*worker, str(int(run.goes_on)))


@contextmanager
def _signals_forwarded() -> Iterator[None]:
    """The first signal goes on to the ranks as SIGINT; the second ends this process at once, and
    the kernel then ends the ranks (``die_with_parent``).

    torch's agent does the forwarding when ``SignalException`` is raised inside it, and waits. Left
    to itself it would answer a second signal by waiting once more.
    """
    seen = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            _end_at_once(number)
        seen = True
        _say("stopping: a batch that has begun is finished and saved; Ctrl-C again ends at once")
        raise SignalException(signal.Signals(number).name, signal.SIGINT)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        if before[number] is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once(number: int) -> NoReturn:
    _say("ended at once; nothing was saved")
    os._exit(128 + number)


def _exits(error: ChildFailedError, config: Config) -> list[Failure]:
    """How the ranks ended, in the order seen; those that the agent ended are left out."""
    failures = list(error.failures.items())
    others = [item for item in failures if item[1].exitcode != -signal.SIGTERM]
    return [
        Failure(
            rank=rank,
            stage=config.parallel.grid.place(rank)[0],
            reason=describe_exit(failure.exitcode),
            time_ns=order,
            lost_peer=False,
        )
        for order, (rank, failure) in enumerate(others or failures)
    ]


def _after_signal(config: Config, folder: Path) -> int:
    if (folder / SUMMARY).is_file():
        if not (code := _verdict(folder)):
            _say(f"stopped as asked; the weights are in {folder / WEIGHTS}")
            _say(f"go on with: {invocation()} train --resume {shlex.quote(str(folder))}")
        return code
    cause = _cause(config, folder, [])
    if cause is not None and not cause.lost_peer:
        return _report(cause, folder)
    _say("stopped before training had begun; nothing was saved")
    return 128 + signal.SIGINT


def _verdict(folder: Path) -> int:
    """The exit code of a run whose ranks all ended in order; what went wrong is said."""
    failure = failure_of(folder)
    if failure:
        _say(f"twobw: {failure}")
    return 1 if failure else 0


def _cause(config: Config, folder: Path, exits: list[Failure]) -> Failure | None:
    """The first cause in the ranks' records and in what the agent saw of the others."""
    records = read_failures(folder, config.num_ranks)
    recorded = {record.rank for record in records}
    return first_cause(records, [failure for failure in exits if failure.rank not in recorded])


def _report(cause: Failure, folder: Path) -> int:
    """Print the last words; return the exit code."""
    _say(last_words(cause, log_path(folder, cause.rank)))
    return 1


def _say(text: str) -> None:
    """Print on standard error, below whatever live display a rank has left on the terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(_SHOW_CURSOR + "\n")
        sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
