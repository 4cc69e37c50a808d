"""Commands run as a user runs them, in a folder with a config and a text."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 90
CONFIG = """
[model]
name = "gpt-tiny"
[data]
paths = ["text.txt"]
[parallel]
schedule = "2bw"
[optimizer]
lr = 1e-2
[training]
num_batches = 12
global_batch_size = 8
evaluation_batches = 2
log_every = 5
timeout_s = 60.0
"""


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Command:
    """A running ``python -m ...`` and what it prints."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str]) -> None:
        self.folder = folder
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=folder,
                env=os.environ | env,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, timeout: float = TIMEOUT_S) -> Ended:
        code = self.process.wait(timeout)
        return Ended(code, self._out.read_text(), self._err.read_text())

    def wait_for_batches(self, count: int) -> None:
        """Wait until the run has written metrics of ``count`` batches."""
        metrics = self.folder / "runs/tiny/metrics.jsonl"

        def has_them() -> bool:
            assert self.process.poll() is None, self.wait()
            return metrics.is_file() and metrics.read_text().count('"batch"') >= count

        wait_until(has_them)

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {
            int(entry.removeprefix("RANK=")): int(child)
            for child in children
            for entry in Path(f"/proc/{child}/environ").read_text().split("\0")
            if entry.startswith("RANK=")
        }


@contextmanager
def started(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Command]:
    """A command in a folder with a config and a text; it has ended when this is left."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "text.txt").write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(1500)))
    command = Command(folder, *arguments, env=env or {})
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()  # its ranks die with it
            command.process.wait(10)


def wait_until(condition: Callable[[], bool], timeout: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.05)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def batches_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in metrics_of(run) if "batch" in row]
