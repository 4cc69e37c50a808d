"""One rank of a training run, under a launcher of ours or another's."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from twobw.config import Config, ConfigError, read_resolved_config
from twobw.training.failures import last_words, record_failure, record_termination
from twobw.training.invocation import invocation
from twobw.training.resuming import OpenRun, folder_before_restart, launcher_file, open_run
from twobw.training.run_folder import CONFIG, NO_FILES, failure_of, log_path
from twobw.training.stopping import die_on, die_with_parent, report_termination

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_AFTER_THE_CAUSE_S = 2.0
_RUN = "twobw/run"
_OUTER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def has_outer_launcher() -> bool:
    """Whether this process is a rank already, of ``torchrun`` or the like."""
    return all(name in os.environ for name in _OUTER)


def main() -> None:
    """Be a rank of ``launch``: ``-m twobw.training.worker FOLDER LAUNCHER_PID COMMAND GOES_ON``.
    The last two are how the user called it (see `invocation`), and 1 or 0 (see `OpenRun`)."""
    launcher = int(sys.argv[2])
    die_with_parent(launcher)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    if rank > 0:
        os.dup2(2, 1)
    # The launcher passes a wish to stop as SIGINT. SIGTERM keeps its meaning, death at once:
    # torch's agent sends it when another rank has died.
    stop_signals = [signal.SIGINT]
    die_on(stop_signals)
    config = read_resolved_config(folder / CONFIG)
    stage = config.parallel.grid.place(rank)[0]
    report_termination(launcher, partial(record_termination, folder, rank, stage))
    try:
        _init_process_group(config, rank)
        _train(config, OpenRun(folder, sys.argv[4] == "1"), stop_signals, sys.argv[3])
    except Exception as error:
        traceback.print_exc()
        record_failure(folder, rank, stage, error)
        _let_go_on(error)
        _exit_at_once()


def run_rank(
    config: Config, files: Mapping[str, str] = NO_FILES, resumed: Path | None = None
) -> int:
    """Be a rank of an outer launcher; return the exit code of the command. Where ``torchrun`` has
    restarted the ranks, the run goes on.

    Args:
        config: of the run.
        files: to be left in its folder, text by name.
        resumed: the folder of the run that goes on; ``None``: a new one.

    Raises:
        ConfigError: the launcher started another number of ranks than the config has, or ranks
            with other configs or versions.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pp, dp = config.parallel.pp, config.parallel.dp
    if world_size != pp * dp:
        raise ConfigError(
            "the launcher",
            [
                f"WORLD_SIZE is {world_size}, but parallel.pp * parallel.dp is {pp} * {dp} = "
                f"{pp * dp}; start that many ranks{_hint(world_size, dp)}"
            ],
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    stop_signals = [signal.SIGINT, signal.SIGTERM]
    die_on(stop_signals)
    folder: Path | None = None
    try:
        store = _init_process_group(config, rank)
        run = _agree_on_run(config, files, resumed, rank, store)
        folder = run.folder
        _train(config, run, stop_signals, invocation())
    except ConfigError:
        raise
    except Exception as error:
        _report(folder, rank, config.parallel.grid.place(rank)[0], error)
        _let_go_on(error)
        _exit_at_once()
    if rank == 0 and (failure := failure_of(folder)):
        sys.stderr.write(f"twobw: {failure}\n")
        return 1
    return 0


def _hint(world_size: int, dp: int) -> str:
    """What would fit the number of ranks that there are."""
    return "" if world_size % dp else f", or set --parallel.pp {world_size // dp}"


def _init_process_group(config: Config, rank: int) -> Store:
    """Meet the other ranks and form the process group; return the store they met in."""
    import torch
    from torch import distributed

    from twobw.training.device import own_device
    from twobw.training.meeting import meet

    torch.set_num_threads(config.training.num_threads)
    timeout = timedelta(seconds=config.training.timeout_s)
    device = own_device(config.training.device)
    store = meet(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        timeout=timeout,
        store=store,
        rank=rank,
        world_size=config.num_ranks,
        # With its device known, NCCL connects at once, and not within the first batch.
        device_id=None if device.type == "cpu" else device,
    )
    return store


def _agree_on_run(
    config: Config, files: Mapping[str, str], resumed: Path | None, rank: int, store: Store
) -> OpenRun:
    """Rank 0 makes the folder and tells the others, which may be on machines of their own."""
    if rank == 0:
        run = open_run(
            config, {**files, **launcher_file()}, resumed or folder_before_restart(config)
        )
        store.set(_RUN, json.dumps([str(run.folder), run.goes_on]))
    store.wait([_RUN], timedelta(seconds=config.training.timeout_s))
    name, goes_on = json.loads(store.get(_RUN))
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    return OpenRun(folder, goes_on)


def _train(config: Config, run: OpenRun, stop_signals: list[signal.Signals], command: str) -> None:
    from torch import distributed

    from twobw.training.loop import train

    train(config, run, stop_signals, command)
    distributed.destroy_process_group()


def _report(folder: Path | None, rank: int, stage: int, error: Exception) -> None:
    """Leave the traceback in the rank's log and the reason on standard error."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from twobw.training.meeting import MeetingError

    if folder is None:
        if isinstance(error, MeetingError):
            sys.stderr.write(f"twobw: rank {rank} (stage {stage}) failed: {error}\n")
        else:
            traceback.print_exc()
        return
    log = log_path(folder, rank)
    with log.open("a", encoding="utf-8") as stream:
        traceback.print_exc(file=stream)
    failure = record_failure(folder, rank, stage, error)
    if failure.lost_peer:
        sys.stderr.write(f"rank {rank} (stage {stage}) has lost another rank; see {log}\n")
        # The launcher takes the first to end for the cause, so let that be the other rank.
        die_on([signal.SIGINT, signal.SIGTERM])
        time.sleep(_AFTER_THE_CAUSE_S)
    else:
        sys.stderr.write(last_words(failure, log) + "\n")
        get_error_handler().record_exception(error)  # for the report of torch's launcher


def _let_go_on(error: Exception) -> None:
    """Continue ranks of this machine that were found stopped: they see that this one has ended,
    and end too. A stopped process would not even take the launcher's SIGTERM."""
    for pid in getattr(error, "stopped", ()):
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def _exit_at_once() -> NoReturn:
    """End without the interpreter's farewell, which could wait long for threads and peers."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
