"""Measuring a `ModelProfile` on this machine, with as many ranks at work as the run will have.

Ranks of one machine share its memory bandwidth and its caches, so that a layer which is timed alone
may be faster than in a run. All ranks therefore measure the same at once, and their samples count
together.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGINT
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch.multiprocessing.spawn import start_processes

from twobw.config import Config
from twobw.profiler.assembly import Duration, layer_profile, microbatch_profile
from twobw.profiler.footprint import Footprint, take_footprint
from twobw.profiler.overhead import time_batches, time_link
from twobw.profiler.profile import (
    SCHEMA_VERSION,
    LayerProfile,
    LinkProfile,
    ModelProfile,
    OverheadProfile,
    load_profile,
)
from twobw.profiler.subject import Subject, make_subject
from twobw.profiler.timing import NUM_ROUNDS, Bench, Kind, Samples
from twobw.training.device import own_device
from twobw.training.stopping import die_on, die_with_parent

_RESULT = "profile.json"
_LONG_MESSAGE_BYTES = 1 << 22  # at least


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
    op_ns, batch_ns = time_batches(config, device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.num_ranks,
        timeout=timedelta(seconds=config.training.timeout_s),
    )
    subject = make_subject(config, microbatch_sizes)
    bench = Bench(subject, device)
    with _progress(is_shown=rank == 0, total=NUM_ROUNDS * len(microbatch_sizes) + 2) as advance:
        footprints = _footprints(bench, subject)
        advance()
        for _ in range(NUM_ROUNDS):
            for size in microbatch_sizes:
                dist.barrier()
                bench.time_microbatches(size)
                advance()
        dist.barrier()
        bench.time_updates()
        advance()
    samples, slowdown = _gathered(bench)
    link, message_ns = _link(config, device, footprints)
    if rank == 0:
        overhead = OverheadProfile(
            op_ns=round(op_ns * slowdown),
            message_ns=round(message_ns * slowdown),
            batch_ns=round(batch_ns * slowdown),
        )
        entries = _entries(subject, bench, footprints, samples, slowdown)
        profile = _profile(subject, entries, slowdown, overhead, link, device)
        Path(folder, _RESULT).write_text(profile.to_json(), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


_Footprints = dict[tuple[int, int], Footprint]  # by layer and microbatch size


def _footprints(bench: Bench, subject: Subject) -> _Footprints:
    """Of each layer but the trivial one."""
    return {
        (number, size): take_footprint(layer, partial(bench.input, number, size))
        for size in subject.microbatch_sizes
        for number, layer in enumerate(bench.layers[:-1])
    }


def _gathered(bench: Bench) -> tuple[Samples, float]:
    """The samples of all ranks together, and how much longer they took by the clock."""
    own = (dict(bench.samples), bench.processor_ns, bench.clock_ns)
    parts = [own] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    samples = {key: [ns for part in parts for ns in part[0][key]] for key in own[0]}
    return samples, sum(part[2] for part in parts) / sum(part[1] for part in parts)


def _link(
    config: Config, device: torch.device, footprints: _Footprints
) -> tuple[LinkProfile | None, int]:
    if config.num_ranks == 1:
        return None, 0
    longest = max(footprint.output_bytes for footprint in footprints.values())
    return time_link(config, device, max(longest, _LONG_MESSAGE_BYTES))


def _entries(
    subject: Subject, bench: Bench, footprints: _Footprints, samples: Samples, slowdown: float
) -> list[LayerProfile]:
    """Of the distinct layers and the loss: what each takes beyond the trivial layer."""
    trivial = len(bench.layers) - 1

    def duration(kind: Kind, number: int, size: int) -> Duration:
        base = Duration.of(samples[kind, trivial, size])
        return Duration.of(samples[kind, number, size]).beyond(base).times(slowdown)

    def entry(number: int) -> LayerProfile:
        update = duration("update", number, 0)
        return layer_profile(
            bench.layers[number],
            [
                microbatch_profile(
                    size,
                    footprints[number, size],
                    duration("forward", number, size),
                    duration("backward", number, size),
                    duration("recompute", number, size),
                )
                for size in subject.microbatch_sizes
            ],
            update,
            duration("copying update", number, 0).beyond(update),
        )

    return [entry(number) for number in range(trivial)]


def _profile(
    subject: Subject,
    entries: Sequence[LayerProfile],
    slowdown: float,
    overhead: OverheadProfile,
    link: LinkProfile | None,
    device: torch.device,
) -> ModelProfile:
    config = subject.config
    is_cpu = device.type == "cpu"
    return ModelProfile(
        schema_version=SCHEMA_VERSION,
        kind="measured",
        model=config.model.name,
        device=_cpu_name() if is_cpu else torch.cuda.get_device_name(device),
        num_threads=config.training.num_threads if is_cpu else 0,
        num_ranks=config.num_ranks,
        slowdown=slowdown,
        precision=config.training.precision,
        optimizer=config.optimizer.name,
        recomputes_attention=config.training.recompute == "attention",
        entries=tuple(entries[:-1]),
        layers=subject.layers,
        loss=entries[-1],
        ties=subject.ties,
        overhead=overhead,
        link=link,
    )


def _cpu_name() -> str:
    """As Linux has it; elsewhere the architecture at least."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


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
