"""What the benchmarks share: teams of processes, targets, the table and the JSON.

Nothing here imports torch. The parent of the measured processes stays small: on Linux a child's
`ru_maxrss` starts from what its parent held when it was started.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from multiprocessing import connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out"
CONSOLE = Console(width=None if sys.stdout.isatty() else 110, highlight=False)

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Seat:
    """A process's place in its team."""

    rank: int
    size: int
    rendezvous: str

    def join(self) -> None:
        """Make the team's gloo process group, over loopback, and hold torch to one thread."""
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=self.rendezvous, rank=self.rank, world_size=self.size
        )


class Team:
    """Processes that work together, started once; between calls they wait on a pipe.

    Args:
        name: for errors.
        build: called as ``build(seat, **arguments)`` in each process; gives the object on which
            `call` calls methods.
        size: number of processes.
        arguments: picklable, or what multiprocessing hands to children.
        timeout: seconds that a start or a call may take.
    """

    def __init__(
        self,
        name: str,
        build: Callable[..., object],
        size: int,
        arguments: dict[str, Any],
        timeout: float = 300.0,
    ) -> None:
        self.name = name
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="twobw-bench-")
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(size):
            seat = Seat(rank, size, f"file://{self._folder.name}/rendezvous")
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(
                target=_serve, args=(theirs, build, seat, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_until_built(self) -> None:
        """Wait for every process's ``build``."""
        self._collect("start")

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method in every process at once; the results by rank.

        Raises:
            RuntimeError: a process raised, died, or took too long.
        """
        for pipe in self._pipes:
            pipe.send((method, args))
        return self._collect(method)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 10.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, what: str) -> list[Any]:
        deadline = time.monotonic() + self._timeout
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in results}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = sorted(waiting.values())
                raise RuntimeError(
                    f"{self.name}: {what} has not ended on ranks {ranks} in {self._timeout:.0f} s"
                )
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                results[rank] = self._receive(rank, what)
        return [results[rank] for rank in sorted(results)]

    def _receive(self, rank: int, what: str) -> Any:
        try:
            succeeded, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(5.0)
            code = self._processes[rank].exitcode
            raise RuntimeError(
                f"{self.name}: rank {rank} died in {what}, exit code {code}"
            ) from None
        if not succeeded:
            raise RuntimeError(f"{self.name}: rank {rank} failed in {what}\n{value}")
        return value


def _serve(
    pipe: connection.Connection, build: Callable[..., object], seat: Seat, arguments: dict[str, Any]
) -> None:
    """A team member's life: build, then answer calls until told to end."""
    try:
        worker = build(seat, **arguments)
        pipe.send((True, None))
        while (command := pipe.recv()) is not None:
            method, args = command
            pipe.send((True, getattr(worker, method)(*args)))
    except EOFError:  # the parent is gone
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        # No orderly end of process groups: their threads may wait for peers that are gone.
        pipe.close()
        os._exit(0)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables for the processes started while open."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def one_thread_each() -> contextlib.AbstractContextManager[None]:
    """The environment of every measured process: one thread, gloo on loopback."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME=loopback)


@dataclass(frozen=True)
class Target:
    """A value that was asked for, beside the one measured."""

    what: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """Whether the measured value is on the right side of the limit."""
        if self.at_least:
            return self.measured >= self.limit
        return self.measured <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        mark = "[green]reached[/]" if self.reached else "[bold red]MISSED[/] "
        return f"{mark}  {self.what}: {self.measured:.3f}, asked {sign} {self.limit:.3f}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)


def report(name: str, results: object, targets: Sequence[Target], path: Path | None) -> None:
    """Print the targets and the command; write the JSON to ``path`` or ``out/NAME.json``."""
    for target in targets:
        CONSOLE.print(str(target), soft_wrap=True)
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    path = path or OUT / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        "command": command,
        "machine": MACHINE,
        "results": results,
        "targets": [{**asdict(target), "reached": target.reached} for target in targets],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    CONSOLE.print(f"made by: {command}", soft_wrap=True)
    CONSOLE.print(f"written: {path}", soft_wrap=True)


def _machine() -> dict[str, object]:
    """Read at import, before the benchmark itself is a load."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


MACHINE = _machine()


def machine_cpu_seconds() -> float | None:
    """Processor time that all cores together did not idle since boot, stolen time included;
    ``None`` where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(number) for number in stat.read_text().splitlines()[0].split()[1:9]]
    idle, waiting_for_disk = ticks[3:5]
    return (sum(ticks) - idle - waiting_for_disk) / os.sysconf("SC_CLK_TCK")


def warn_if_busy() -> None:
    """Say so if other work on this machine will show in the numbers."""
    load = float(str(MACHINE["load_average_at_start"]))
    if load > 0.5:
        CONSOLE.print(f"[yellow]the machine was not idle at the start: load average {load:.1f}[/]")
