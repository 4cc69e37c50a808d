import signal
import subprocess
import sys
import time

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")


def run(code: str) -> subprocess.CompletedProcess[str]:
    code = f"import os, signal\nfrom twobw.training.stopping import *\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_first_signal_asks_the_second_ends() -> None:
    ended = run("""
stop_on([signal.SIGINT, signal.SIGTERM], lambda: print("asked", flush=True))
os.kill(os.getpid(), signal.SIGINT)
print("going on", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("not reached", flush=True)
""")
    assert (ended.stdout, ended.stderr) == ("asked\ngoing on\n", "")
    assert ended.returncode == 128 + signal.SIGTERM


def test_before_training_a_signal_ends_the_process_at_once() -> None:
    ended = run("""
die_on([signal.SIGINT])
os.kill(os.getpid(), signal.SIGINT)
print("not reached", flush=True)
""")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", -signal.SIGINT)


TERMINATED = """
import threading, time
report_termination(int(os.environ["LAUNCHER"] or os.getpid()), lambda pid: print(pid, flush=True))
waiting = threading.Lock()
waiting.acquire()
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
waiting.acquire()  # a wait that no Python signal handler interrupts
"""


@LINUX
@pytest.mark.parametrize(("launcher", "is_reported"), [("", False), ("1", True)])
def test_a_sigterm_ends_the_process_and_is_reported_unless_the_launcher_sent_it(
    monkeypatch: pytest.MonkeyPatch, launcher: str, is_reported: bool
) -> None:
    monkeypatch.setenv("LAUNCHER", launcher)
    ended = run(TERMINATED)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout.strip().isdigit() is is_reported
    assert ended.stderr == ""


@LINUX
def test_a_sigterm_ends_the_process_even_where_it_cannot_be_reported() -> None:
    ended = run("""
import time
report_termination(1, lambda pid: 1 / 0)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
""")
    assert ended.returncode == -signal.SIGTERM


@LINUX
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
