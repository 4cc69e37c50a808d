"""What ``twobw doctor`` does: whether this machine, or the ranks of a launcher, can train."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from twobw import __version__
from twobw.reports.table_text import aligned
from twobw.training import loopback
from twobw.training.machine import available_bytes, usable_cores
from twobw.training.resources import PROCESS_BYTES

_LIMIT = timedelta(seconds=60)
_PINGS = 40
_LONG_BYTES = 1 << 22
_GB = 1e9
_SHARED_MEMORY = Path("/dev/shm")

# What is less (or more) is a problem.
_FREE_DISK_BYTES = 1e9
_SHARED_BYTES = 64e6
_FSYNC_S = 1.0
_CLOCK_S = 1e-3
_SKEW_S = 0.1
_LATENCY_S = 5e-3
_BANDWIDTH = 50e6


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: it was.
        value: as found.
        remedy: what is wrong and what to do; empty where all is well.
    """

    what: str
    value: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """What was measured between two ranks."""

    latency_s: float
    bytes_per_second: float
    skew_s: float


def run_doctor_command(folder: Path, num_ranks: int) -> tuple[str, int]:
    """Look at this machine; under a launcher, at all its ranks' links.

    Args:
        folder: where runs go.
        num_ranks: that are to train here.

    Returns:
        A table, and the exit code: 1 if something is wrong. Nothing on other ranks than 0.
    """
    from twobw.training.worker import has_outer_launcher

    checks: list[Callable[[], Finding]] = [
        versions,
        lambda: processors(num_ranks),
        gpus,
        lambda: memory(num_ranks),
        shared_memory,
        clock,
        lambda: disk(folder),
    ]
    findings: list[Finding] = [_checked(check) for check in checks]
    findings += outer_links() if has_outer_launcher() else [_checked(local_link)]
    if int(os.environ.get("RANK", "0")) > 0:
        return "", 0
    rows = [("what", "found", ""), *((f.what, f.value, _mark(f)) for f in findings)]
    problems = [f"{finding.what}: {finding.remedy}" for finding in findings if finding.remedy]
    verdict = "all is well" if not problems else "\n".join(problems)
    return f"{aligned(rows, num_left=3)}\n\n{verdict}", 1 if problems else 0


def _mark(finding: Finding) -> str:
    return "see below" if finding.remedy else "ok"


def _checked(check: Callable[[], Finding]) -> Finding:
    """A check that itself fails has found something."""
    try:
        return check()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        name = getattr(check, "__name__", "check").replace("_", " ")
        return Finding(name, "failed", f"{type(error).__name__}: {first_line}")


def versions() -> Finding:
    """Of all that matters, and the ways ranks can talk."""
    has = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    backends = ", ".join(name for name, there in has.items() if there) or "no backend"
    value = f"twobw {__version__}, torch {torch.__version__}, {backends}"
    remedy = ""
    if not has["gloo"]:
        remedy = "this build of torch has no gloo; install one from pytorch.org"
    elif torch.cuda.is_available() and not has["nccl"]:
        remedy = "there are GPUs, but this build of torch has no nccl; install one that has"
    return Finding("versions", f"{value}, Python {platform.python_version()}", remedy)


def processors(num_ranks: int) -> Finding:
    """Cores that this process may use, against ranks."""
    cores = usable_cores()
    remedy = ""
    if cores < num_ranks and not torch.cuda.is_available():
        remedy = (
            f"{num_ranks} ranks share {cores}, and slow each other down; train with at most "
            f"{cores} here (parallel.pp * parallel.dp)"
        )
    return Finding("processor cores", f"{cores} for {num_ranks} ranks", remedy)


def gpus() -> Finding:
    """Those that torch can use."""
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    return Finding("GPUs", f"{count} ({', '.join(sorted(names))})" if count else "none; CPU")


def memory(num_ranks: int) -> Finding:
    """What ranks can have of the host's."""
    free = available_bytes()
    remedy = ""
    if free < 2 * num_ranks * PROCESS_BYTES:
        remedy = f"{num_ranks} ranks take {num_ranks * PROCESS_BYTES / _GB:.1f} GB before they have"
        remedy += " a model; end other programs"
    return Finding("memory available", f"{free / _GB:.1f} GB", remedy)


def shared_memory() -> Finding:
    """What processes of one machine exchange data through, where NCCL or data loaders do."""
    if not _SHARED_MEMORY.is_dir():
        return Finding("shared memory", "no /dev/shm")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    remedy = ""
    if free < _SHARED_BYTES:
        remedy = "NCCL and data loaders need more; start the container with --shm-size=1g"
    return Finding("shared memory", f"{free / _GB:.2f} GB free in {_SHARED_MEMORY}", remedy)


def clock() -> Finding:
    """How fine the clock is that spans are measured by."""
    resolution = time.get_clock_info("monotonic").resolution
    remedy = ""
    if resolution > _CLOCK_S:
        remedy = "spans of ops cannot be told apart by it; use another machine to measure"
    return Finding("clock", f"{resolution * 1e9:.0f} ns", remedy)


def disk(folder: Path) -> Finding:
    """Room for runs, and how long a write takes to be safe."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK)):
        return Finding("disk", str(folder), f"{place} cannot be written to; set run.folder")
    free = shutil.disk_usage(place).free
    with tempfile.TemporaryFile(dir=place) as file:
        start = time.perf_counter()
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    remedies = []
    if free < _FREE_DISK_BYTES:
        remedies.append("little room for weights and checkpoints; set run.folder")
    if seconds > _FSYNC_S:
        remedies.append("writing is slow, and so will checkpoints be; set run.folder")
    value = f"{free / _GB:.1f} GB free in {place}, 1 MiB safe in {seconds * 1e3:.0f} ms"
    return Finding("disk", value, "; ".join(remedies))


def local_link() -> Finding:
    """Between two processes of this machine, over the loopback, as ranks are started."""
    store = loopback.loopback_store()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    script = "from twobw.training.doctor import be_peer; be_peer()"
    peer = subprocess.Popen([sys.executable, "-P", "-c", script, str(store.port)])
    try:
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=_LIMIT)
        link = measure_link(0, 1)
        dist.destroy_process_group()
        peer.wait(_LIMIT.total_seconds())
    finally:
        peer.kill()
        peer.wait()
    return link_finding("link between ranks", link, same_clock=True)


def be_peer() -> None:
    """The other process of `local_link`; the last argument is the store's port."""
    store = dist.TCPStore(loopback.ADDRESS, int(sys.argv[-1]))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=_LIMIT)
    measure_link(1, 0)
    dist.destroy_process_group()


def outer_links() -> Iterator[Finding]:
    """From rank 0 to each other rank of a launcher, one after another; every rank calls it."""
    from twobw.training.meeting import open_store

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(rank, _LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_LIMIT)
    for other in range(1, size):
        if rank in (0, other):
            link = measure_link(rank, other if rank == 0 else 0)
            yield link_finding(f"link from rank 0 to rank {other}", link, same_clock=False)
        dist.barrier()
    dist.destroy_process_group()


def measure_link(rank: int, peer: int) -> Link:
    """Messages there and back between two ranks of the default group, both of which call it; the
    smaller one measures, and both get its figures but the skew, which is the other's clock less
    its own."""
    asks = rank < peer
    short, long = torch.zeros(1, dtype=torch.float64), torch.zeros(_LONG_BYTES, dtype=torch.uint8)
    trips: list[tuple[float, float]] = []  # seconds there and back, the other's clock less ours
    for _ in range(_PINGS):
        start = time.time()
        if asks:
            dist.send(short, peer)
            dist.recv(short, peer)
            end = time.time()
            trips.append((end - start, short.item() - (start + end) / 2))
        else:
            dist.recv(short, peer)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), peer)
    long_s: list[float] = []
    for _ in range(5):
        start = time.time()
        for step in range(2):
            if asks == (step == 0):
                dist.send(long, peer)
            else:
                dist.recv(long, peer)
        long_s.append((time.time() - start) / 2)
    latency = median(seconds for seconds, _ in trips) / 2 if trips else 0.0
    skew = min(trips)[1] if trips else 0.0
    return Link(latency, _LONG_BYTES / min(long_s), skew)


def link_finding(what: str, link: Link, *, same_clock: bool) -> Finding:
    """What a link means for training."""
    value = f"{link.latency_s * 1e6:.0f} us, {link.bytes_per_second / 1e6:,.0f} MB/s"
    remedies = []
    if link.latency_s > _LATENCY_S or link.bytes_per_second < _BANDWIDTH:
        remedies.append("slow for a pipeline; look for load, or set parallel.extra_in_flight")
    if not same_clock:
        value += f", clock off by {link.skew_s * 1e3:+.1f} ms"
        if abs(link.skew_s) > _SKEW_S:
            remedies.append("timelines of ranks will not match; let NTP set the clocks")
    return Finding(what, value, "; ".join(remedies))
