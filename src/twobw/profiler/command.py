"""What ``twobw profile`` and ``twobw cluster`` do. Torch is loaded only once all is checked."""

from __future__ import annotations

import os
from pathlib import Path

from twobw.config import Config
from twobw.profiler.device import find_device
from twobw.profiler.table import profile_text
from twobw.training.machine import local_cluster, num_local_devices
from twobw.training.run_folder import write_text


def run_profile_command(config: Config, sizes: str, device: str | None, out: Path | None) -> str:
    """Profile, write the profile to a file, and tell what is in it.

    Args:
        config: of the run that the profile is for.
        sizes: microbatch sizes with commas between.
        device: a device's name or description; ``None``: this machine.
        out: the file; ``None``: in the folder of runs.

    Raises:
        ValueError: sizes that are none, or an unknown device, before anything runs.
        OSError: the file cannot be written, likewise.
    """
    microbatch_sizes = parse_sizes(sizes)
    spec = None if device is None else find_device(device)
    if spec is not None:
        spec.flops_per_second(config.training.precision, 1)
    path = out or Path(config.run.folder, f"{config.run.name}.profile.json")
    _check_writable(path, "profile")
    if spec is None:
        from twobw.profiler.measure import measure_profile

        profile = measure_profile(config, microbatch_sizes)
    else:
        from twobw.profiler.analytic import compute_profile

        profile = compute_profile(config, microbatch_sizes, spec)
    write_text(path, profile.to_json())
    return f"{profile_text(profile)}\n\nthe profile is in {path}"


def run_cluster_command(num_threads: int, out: Path, *, measures: bool) -> str:
    """Measure the link between two ranks and write this machine's description to a file.

    Args:
        num_threads: of a rank.
        out: the file.
        measures: whether that is wished for.

    Returns:
        What has been written, and where.

    Raises:
        ValueError: numbers that do not fit, or a description without measuring is asked for.
        OSError: the file cannot be written.
    """
    if not measures:
        raise ValueError(
            "twobw cluster describes this machine by measuring it: give --measure. For other "
            "machines write the file by hand, in the form that this one has"
        )
    if num_threads < 1:
        raise ValueError(f"--threads is {num_threads}; it must be at least 1")
    _check_writable(out, "description")
    link = None
    if (num_devices := num_local_devices(num_threads)) > 1:
        from twobw.profiler.measure import measure_link

        link = measure_link(num_threads)
    text = local_cluster(link, num_devices).to_toml()
    write_text(out, text)
    return f"{text}\nthe description is in {out}"


def _check_writable(path: Path, what: str) -> None:
    """Make the folder of a file that is to be written.

    Raises:
        OSError: there cannot be such a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the {what} the name of a file")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path.parent} cannot be written to; give another folder")


def parse_sizes(text: str) -> list[int]:
    """``"4,1,2"`` as ascending sizes, each once.

    Raises:
        ValueError: something is not a whole number of at least 1.
    """
    sizes = set()
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise ValueError(
                f"microbatch size {word.strip()!r} is not a whole number of at least 1; give "
                "sizes with commas between, such as 1,2,4"
            )
        sizes.add(int(word))
    return sorted(sizes)
