"""Measuring a `ModelProfile` on this machine, with as many ranks at work as the run will have."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from signal import SIGINT
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch.multiprocessing.spawn import start_processes

from twobw.config import Config
from twobw.profiler.overhead import LONG_MESSAGE_BYTES, time_batches, time_link
from twobw.profiler.profile import LinkProfile, ModelProfile
from twobw.profiler.rank import RankProfiler
from twobw.profiler.timing import NUM_ROUNDS
from twobw.training.device import own_device
from twobw.training.stopping import die_on, die_with_parent

_RESULT = "result.json"
_LINK_TIMEOUT_S = 60.0


def measure_profile(config: Config, microbatch_sizes: Sequence[int]) -> ModelProfile:
    """Profile the model of ``config`` with its ranks, threads, precision and optimizer; show the
    progress on standard error.

    Args:
        config: of the run that the profile is for.
        microbatch_sizes: in samples, ascending.
    """
    arguments = (config, tuple(microbatch_sizes))
    num_threads = config.training.num_threads
    return ModelProfile.from_json(_result_of(_profile, arguments, config.num_ranks, num_threads))


def measure_link(num_threads: int) -> LinkProfile:
    """The link between two ranks of so many threads on this machine."""
    return LinkProfile.model_validate_json(_result_of(_link, (num_threads,), 2, num_threads))


def _result_of(
    function: Callable[..., None], arguments: tuple[object, ...], num_ranks: int, num_threads: int
) -> bytes:
    """Start ranks, each of which runs ``function(rank, *arguments, folder, parent)``; what rank 0
    has left in the folder."""
    # Ranks of one machine meet on the loopback, whatever its name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    with TemporaryDirectory(prefix="twobw-profile-") as folder:
        everything = (*arguments, Path(folder), os.getpid())
        start_processes(function, everything, nprocs=num_ranks, start_method="spawn")
        return Path(folder, _RESULT).read_bytes()


def _become_rank(rank: int, num_threads: int, parent: int, wanted: str = "auto") -> torch.device:
    """What a process does first; its device."""
    die_with_parent(parent)
    die_on([SIGINT])
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(num_threads)
    device = own_device(wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _join(rank: int, num_ranks: int, device: torch.device, folder: Path, timeout_s: float) -> None:
    """Make the process group."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def _leave(rank: int, folder: Path, result: str) -> None:
    """Leave the result, on rank 0, and the process group."""
    if rank == 0:
        Path(folder, _RESULT).write_text(result, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _link(rank: int, num_threads: int, folder: Path, parent: int) -> None:
    """One of two processes."""
    device = _become_rank(rank, num_threads, parent)
    _join(rank, 2, device, folder, _LINK_TIMEOUT_S)
    link, _ = time_link(device, LONG_MESSAGE_BYTES, _LINK_TIMEOUT_S)
    _leave(rank, folder, link.model_dump_json())


def _profile(
    rank: int, config: Config, microbatch_sizes: tuple[int, ...], folder: Path, parent: int
) -> None:
    """One of the processes of a profile."""
    device = _become_rank(rank, config.training.num_threads, parent, config.training.device)
    batch_times = time_batches(config, device)
    _join(rank, config.num_ranks, device, folder, config.training.timeout_s)
    with _progress(is_shown=rank == 0, total=NUM_ROUNDS * len(microbatch_sizes) + 2) as advance:
        profiler = RankProfiler(config, microbatch_sizes, device, batch_times)
        advance()
        for _ in range(NUM_ROUNDS):
            for size in microbatch_sizes:
                profiler.time_microbatches(size)
                advance()
        profiler.time_updates()
        advance()
    _leave(rank, folder, profiler.profile().to_json())


@contextmanager
def _progress(*, is_shown: bool, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error; what it gives moves it on by one. It is drawn at those moments
    only: a thread that draws would take time from what is measured."""
    console = Console(stderr=True, quiet=not is_shown)
    with Progress(console=console, auto_refresh=False) as bar:
        task = bar.add_task("profiling", total=total)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance
