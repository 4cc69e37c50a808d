"""Ctrl-C in a rank, and its end when the launcher ends. Imported before torch, so kept light."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopRequest:
    """Turns the first signal into a wish to stop after the next batch; the second ends the process.

    The wish may come before there is a pipeline to tell: it is passed on when ``attach`` is called.
    """

    def __init__(self) -> None:
        self.requested = False
        self._tell: Callable[[], None] | None = None

    def install(self, signals: Iterable[signal.Signals]) -> None:
        """Handle these signals from now on (main thread only)."""
        for number in signals:
            signal.signal(number, self._handle)

    def attach(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` at the first signal, or now where it has come already."""
        self._tell = tell
        if self.requested:
            tell()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = True
        if self._tell is not None:
            self._tell()


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
