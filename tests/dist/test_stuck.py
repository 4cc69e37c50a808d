"""Ranks that stop, that never come, and that disagree."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.dist.commands import CONFIG, Command, is_running, started, wait_until
from twobw.training.run_folder import log_path

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ENDLESS = ("--training.num_batches", "1000000", "--training.log_every", "1000000")


@LINUX
def test_a_stopped_rank_is_named_and_the_run_ends(tmp_path: Path) -> None:
    """Of three stages with a global norm, so that all wait, on both threads."""
    settings = ["--parallel.pp", "3", "--training.max_grad_norm", "1", "--training.timeout_s", "15"]
    with started(tmp_path, "twobw", "train", "tiny.toml", *ENDLESS, *settings) as command:
        command.wait_for_batches(100)  # which take longer than a rank is silent between two beats
        ranks = command.ranks()
        os.kill(ranks[1], signal.SIGSTOP)
        ended = command.wait()
    assert ended.code == 1
    assert not any(map(is_running, ranks.values()))
    _, first, *told, cause = ended.err.splitlines()
    who = re.match(r"twobw: rank ([02]) \(stage \1\) failed: StuckError: waited (\d+\.\d) s", first)
    assert who, first
    assert float(who[2]) == pytest.approx(15, abs=2)
    assert "(limit 15 s) for " in first
    assert f"on stage {who[1]}, in " in first
    assert [line.split(":")[0] for line in told] == [f"  rank {r} (stage {r})" for r in range(3)]
    assert re.search(r"rank 1 \(stage 1\): no sign of life for \d+\.\d s; then: batch \d+; ", told[1])
    assert all("last op ended" in line for line in told)
    assert cause == (
        f"  likely cause: process {ranks[1]} of rank 1 is stopped (SIGSTOP); "
        f"`kill -CONT {ranks[1]}` lets it go on"
    )
    log = log_path(tmp_path / "runs/tiny", int(who[1])).read_text()
    assert f"rank {who[1]} (stage {who[1]}) still waits for " in log


def rank_of(folder: Path, rank: int, port: int, *settings: str) -> Command:
    """One rank of two, as a launcher that knows nothing of torch would start it."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "text.txt").write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(1500)))
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return Command(folder, "twobw", "train", "tiny.toml", *settings, env=place)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_ranks_with_other_settings_are_refused_by_name(tmp_path: Path, port: int) -> None:
    a = rank_of(tmp_path / "a", 0, port)
    b = rank_of(tmp_path / "b", 1, port, "--training.seed", "5", "--training.num_threads", "2")
    for command in (a, b):
        ended = command.wait()
        assert (ended.code, ended.err) == (
            2,
            "twobw: the ranks disagree: 1 problem\n  training.seed is 0 on rank 0, 5 on rank 1; it "
            "must be the same everywhere\n",
        )
    assert not (tmp_path / "a/runs").exists()


def test_a_rank_that_never_comes_is_named(tmp_path: Path, port: int) -> None:
    ended = rank_of(tmp_path / "a", 0, port, "--training.timeout_s", "2").wait()
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == (
        "twobw: rank 0 (stage 0) failed: rank 1 (stage 1) has not come within 2 s "
        "(training.timeout_s) of 2 ranks; its log or machine tells why: not started, stopped, or "
        "without a way to this one"
    )
    assert "Traceback" not in ended.err


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = rank_of(tmp_path / "a", 0, port, "--training.timeout_s", "5").wait()
    assert ended.code == 1
    assert f"MASTER_PORT = {port} is in use on this machine; end the other program" in ended.err
    assert "Traceback" not in ended.err


@LINUX
def test_a_local_run_listens_on_the_loopback_only(tmp_path: Path) -> None:
    with started(tmp_path, "twobw", "train", "tiny.toml", *ENDLESS) as command:
        command.wait_for_batches(1)
        pids = [command.process.pid, *command.ranks().values()]
        addresses = {address for pid in pids for address in listening(pid)}
        command.process.send_signal(signal.SIGKILL)
        command.process.wait(10)
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, addresses
    wait_until(lambda: not any(map(is_running, pids[1:])), timeout=5)


def listening(pid: int) -> set[str]:
    """The addresses that a process listens on."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            sockets.add(match[1])
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, raw))
    return found
