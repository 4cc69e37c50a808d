"""Feeds broken files to the commands: configs, schedules in CSV, profiles, plans, clusters.

Each must be taken or refused with a message; a traceback, a wait, or a file that is written where
one was is a fault. Prints how many were tried, and every fault. Exit code 1 if there is one.

    .venv/bin/python benchmarks/fuzz.py [--count 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from twobw.cli import main as twobw
from twobw.config import load_config

LIMIT_S = 60
PIECES = [
    "",
    "0",
    "-1",
    "1e400",
    "nan",
    "null",
    '"',
    "[",
    "]]",
    "{",
    "}",
    ",",
    "\n",
    "\0",
    "é",
    "[[]]",
]
PIECES += [
    "true",
    "1" * 40,
    "3.5",
    "'x'",
    '"../../x"',
    "= =",
    "F0",
    "0F0",
    "0B999999999",
    "[model]",
]


def mutated(text: str, draw: random.Random) -> str:
    """``text`` with one to four changes: pieces cut, doubled, swapped or put in."""
    for _ in range(draw.randint(1, 4)):
        a, b = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + draw.choice([1, 3, 40]))
        match draw.randrange(4):
            case 0:
                text = text[:a] + text[b:]
            case 1:
                text = text[:b] + text[a:]
            case 2:
                text = text[:a] + draw.choice(PIECES) + text[b:]
            case _:
                numbers = [i for i, letter in enumerate(text) if letter.isdigit()]
                if numbers:
                    at = draw.choice(numbers)
                    text = text[:at] + draw.choice(PIECES) + text[at + 1 :]
    return text


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault_of(call: Callable[[], object]) -> str | None:
    """What went wrong in a call that may refuse its input."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            call()
    except SystemExit as ended:
        if ended.code not in (None, 0, 1, 2):
            return f"exit code {ended.code}"
        if ended.code == 2 and not err.getvalue() + out.getvalue():
            return "refused without a word"
    except BaseException:
        return traceback.format_exc()
    return None


def subjects(folder: Path) -> dict[str, tuple[str, Callable[[Path], object]]]:
    """For each kind of file a right one, and what is done with it."""

    def made(*arguments: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            twobw(list(arguments))
        return out.getvalue()

    config = Path("configs/demo.toml").resolve()
    profile, plan, cluster = (folder / name for name in ("profile.json", "plan.json", "c.toml"))
    cluster.write_text(
        'name = "here"\ndevices_per_node = 2\ndevice_memory_bytes = 16000000000\n'
        "[inside]\nlatency_ns = 1000\nbytes_per_second = 1e9\n"
    )
    made("profile", str(config), "--device", "v100-16gb", "--out", str(profile))
    planning = ["--cluster", str(cluster), "--global-batch", "8"]
    made("plan", "--profile", str(profile), *planning, "--out", str(plan))
    csv = made("schedule", "1f1b", "--stages", "3", "--microbatches", "4", "--batches", "1",
               "--format", "csv")  # fmt: skip
    batch = ["--global-batch", "8"]
    return {
        "config": (config.read_text(), lambda path: loaded(path)),
        "schedule": (csv, lambda path: twobw(["schedule", "--check", str(path)])),
        "profile": (
            profile.read_text(),
            lambda path: twobw(["plan", "--profile", str(path), *planning]),
        ),
        "cluster": (
            cluster.read_text(),
            lambda path: twobw(["plan", "--profile", str(profile), "--cluster", str(path), *batch]),
        ),
        "plan": (plan.read_text(), lambda path: twobw(["simulate", str(path)])),
    }


def loaded(path: Path) -> None:
    """As ``twobw train`` reads a config, before anything starts."""
    try:
        load_config(path)
    except ValueError as error:
        sys.stderr.write(str(error))
        sys.exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    num_faults = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = subjects(folder)
        assert all(text for text, _ in kinds.values()), "each kind has a right file"
        before = {path: path.read_bytes() for path in folder.iterdir()}
        for number in range(arguments.count):
            kind = draw.choice(list(kinds))
            text, use = kinds[kind]
            path = folder / f"broken-{os.getpid()}"
            path.write_text(mutated(text, draw), "utf-8")
            content = path.read_bytes()
            fault = fault_of(lambda use=use, path=path: use(path))
            if fault is None and path.read_bytes() != content:
                fault = "the file was written to"
            if fault is not None:
                num_faults += 1
                print(f"--- {kind} {number}: {fault}\n{content.decode()[:2000]}\n")
            path.unlink()
        written = {path for path, was in before.items() if path.read_bytes() != was}
        new = set(folder.iterdir()) - set(before)
        if written or new:
            num_faults += 1
            print(f"--- files: {written} overwritten, {new} left behind")
    print(f"{arguments.count} broken files tried, {num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
