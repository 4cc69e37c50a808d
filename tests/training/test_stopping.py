import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from twobw.training.stopping import StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = signal.getsignal(signal.SIGUSR1)
    request = StopRequest()
    request.install([signal.SIGUSR1])
    yield request
    signal.signal(signal.SIGUSR1, before)


def test_the_first_signal_is_passed_on(stop: StopRequest) -> None:
    told: list[bool] = []
    stop.attach(lambda: told.append(True))
    assert told == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == [True]


def test_a_signal_before_there_is_someone_to_tell_is_not_lost(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    told: list[bool] = []
    stop.attach(lambda: told.append(True))
    assert told == [True]


def test_the_second_signal_ends_the_process() -> None:
    code = """
import os, signal
from twobw.training.stopping import StopRequest
stop = StopRequest()
stop.install([signal.SIGINT])
os.kill(os.getpid(), signal.SIGINT)
print("once", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("twice", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("once\n", 128 + signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_process_dies_with_its_parent() -> None:
    child = """
import os, time
from twobw.training.stopping import die_with_parent
die_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        pid = int(top.stdout.readline())
        top.kill()
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not merely waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
