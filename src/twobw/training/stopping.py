"""Ctrl-C in a rank, and its end when the launcher ends. Imported before torch, so kept light."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable
from threading import Thread
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_on(signals: Iterable[signal.Signals]) -> None:
    """Let these signals end the process at once, whatever it is doing: until there is something
    to save, and even where a wait inside C code would keep a handler from running."""
    for number in signals:
        signal.signal(number, signal.SIG_DFL)


def stop_on(signals: Iterable[signal.Signals], request_stop: Callable[[], None]) -> None:
    """Let the first of these signals call ``request_stop``, and a second end the process."""
    is_requested = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested:
            os._exit(128 + number)
        is_requested = True
        request_stop()

    for number in signals:
        signal.signal(number, handle)


def report_termination(launcher: int, report: Callable[[int], object]) -> None:
    """Let SIGTERM end the process as ever, but first call ``report`` with the sender's process id
    if that is not ``launcher``, which so ends the ranks that another rank's end has left behind.

    A thread waits for the signal: a handler would not learn the sender, and would run only after
    whatever wait inside C code the main thread is in. Call it before other threads start, since
    all must leave the signal to that one. Elsewhere than on Linux nothing is done.
    """
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def wait() -> None:
        sender = signal.sigwaitinfo([signal.SIGTERM]).si_pid
        try:
            if sender != launcher:
                report(sender)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # this thread's
            os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait, name="sigterm", daemon=True).start()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the one that started it ends, however it ends.

    Elsewhere than on Linux nothing is done: there a launcher that is killed outright may leave
    ranks behind until their next wait for one another fails.

    Args:
        parent: process id of the launcher; if it is gone already, this process ends here.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
