"""This machine as a `ClusterSpec`."""

from __future__ import annotations

import os
from pathlib import Path

from twobw.planner.cluster import ClusterSpec
from twobw.profiler.profile import LinkProfile

_NO_LINK = LinkProfile(latency_ns=0, bytes_per_second=10**9)  # of a single device: never used


def num_local_devices(num_threads: int) -> int:
    """GPUs of this machine; without any, how often so many threads go into its cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(usable_cores() // num_threads, 1)


def local_cluster(link: LinkProfile | None, num_devices: int) -> ClusterSpec:
    """This machine.

    Args:
        link: measured between two ranks; ``None`` with one device, which has none.
        num_devices: as `num_local_devices`.
    """
    return ClusterSpec(
        name="this machine",
        devices_per_node=num_devices,
        device_memory_bytes=_memory_bytes(num_devices),
        inside=link or _NO_LINK,
    )


def _memory_bytes(num_devices: int) -> int:
    """What training may use of a device: a GPU's memory that is free, or a share of the host's."""
    import torch

    if torch.cuda.is_available():
        return min(torch.cuda.mem_get_info(device)[0] for device in range(num_devices))
    return available_bytes() // num_devices


def available_bytes() -> int:
    """Of the host: what programs can have without swapping, which Linux estimates; elsewhere all
    that there is."""
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
