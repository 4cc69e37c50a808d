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
from twobw.profiler.overhead import time_batches
from twobw.profiler.profile import ModelProfile, load_profile
from twobw.profiler.rank import RankProfiler
from twobw.profiler.timing import NUM_ROUNDS
from twobw.training.device import own_device
from twobw.training.stopping import die_on, die_with_parent

_RESULT = "profile.json"


def measure_profile(config: Config, microbatch_sizes: Sequence[int]) -> ModelProfile:
    """Profile the model of ``config`` with its ranks, threads, precision and optimizer; show the
    progress on standard error.

    Args:
        config: of the run that the profile is for.
        microbatch_sizes: in samples, ascending.
    """
    # Ranks of one machine meet on the loopback, whatever its name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.environ["OMP_NUM_THREADS"] = str(config.training.num_threads)
    with TemporaryDirectory(prefix="twobw-profile-") as folder:
        arguments = (config, tuple(microbatch_sizes), Path(folder), os.getpid())
        start_processes(_run_rank, arguments, nprocs=config.num_ranks, start_method="spawn")
        return load_profile(Path(folder, _RESULT))


def _run_rank(
    rank: int, config: Config, microbatch_sizes: tuple[int, ...], folder: Path, parent: int
) -> None:
    """One of the processes; rank 0 leaves the profile in ``folder``."""
    die_with_parent(parent)
    die_on([SIGINT])
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(config.training.num_threads)
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    batch_times = time_batches(config, device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.num_ranks,
        timeout=timedelta(seconds=config.training.timeout_s),
    )
    with _progress(is_shown=rank == 0, total=NUM_ROUNDS * len(microbatch_sizes) + 2) as advance:
        profiler = RankProfiler(config, microbatch_sizes, device, batch_times)
        advance()
        for _ in range(NUM_ROUNDS):
            for size in microbatch_sizes:
                profiler.time_microbatches(size)
                advance()
        profiler.time_updates()
        advance()
    profile = profiler.profile()
    if rank == 0:
        Path(folder, _RESULT).write_text(profile.to_json(), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


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
