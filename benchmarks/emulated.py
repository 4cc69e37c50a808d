"""Emulated layers, groups and links, for benchmarks of schedules, not of arithmetic: they sleep.

Sleeping takes no processor, so many processes fit a few cores.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twobw.runtime import pipeline
from twobw.runtime.collectives import Collective, Operation
from twobw.runtime.mesh import Mesh

WIDTH = 8
BACKWARD_OVER_FORWARD = 2


class _Sleep(torch.autograd.Function):
    """Sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(BACKWARD_OVER_FORWARD * ctx.seconds)
        return gradient, gradient.sum(0), None


class SleepingLayer(nn.Module):
    """A layer that takes a set time: ``(b, WIDTH)`` to the same."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self._seconds = seconds

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(value, self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return output


class SlowCollective:
    """A group whose every call takes ``seconds`` longer; as free as ever where it is of one rank.

    Attributes:
        num_calls: made so far.
    """

    def __init__(self, group: Collective, seconds: float) -> None:
        self._group = group
        self._seconds = seconds
        self.size = group.size
        self.index = group.index
        self.num_calls = 0

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        self._take_time()
        self._group.all_reduce(tensor, operation)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._take_time()
        return self._group.all_gather(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._take_time()
        self._group.broadcast(tensor, source)

    def fail(self) -> None:
        self._group.fail()

    def _take_time(self) -> None:
        if self.size > 1:
            self.num_calls += 1
            time.sleep(self._seconds)


class TwinReplicas:
    """A group of two replicas of which the other one does as this one: no process needed."""

    size = 2
    index = 0

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        if operation == "sum":
            tensor.mul_(2)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone(), tensor.clone()]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def fail(self) -> None:
        pass


class SlowGroups:
    """While installed, the groups that reductions go through are slow in this process.

    Args:
        seconds: that each call takes.
        twin_replicas: whether each rank also has an emulated replica of itself.
    """

    def __init__(self, seconds: float, *, twin_replicas: bool) -> None:
        self._seconds = seconds
        self._twin_replicas = twin_replicas
        self._groups: list[SlowCollective] = []

    @property
    def num_calls(self) -> int:
        """Made so far, over all groups."""
        return sum(group.num_calls for group in self._groups)

    def install(self) -> None:
        """For the pipelines made from now on in this process, for its life."""
        make_mesh = pipeline.distributed_mesh

        def make_slow_mesh(*args: Any) -> Mesh:
            mesh = make_mesh(*args)
            replicas: Collective = TwinReplicas() if self._twin_replicas else mesh.replicas
            return replace(
                mesh,
                replicas=self._slow(replicas),
                stages=self._slow(mesh.stages),
                ties={stages: self._slow(group) for stages, group in mesh.ties.items()},
            )

        pipeline.distributed_mesh = make_slow_mesh

    def _slow(self, group: Collective) -> SlowCollective:
        self._groups.append(SlowCollective(group, self._seconds))
        return self._groups[-1]


class SlowLinks:
    """While installed, what this process sends leaves only after ``seconds``.

    Args:
        seconds: from `torch.distributed.isend` to the real one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._isend = dist.isend
        self._waiting: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()

    def install(self) -> None:
        """From now on, for the life of this process."""
        threading.Thread(target=self._send_when_due, name="slow-links", daemon=True).start()
        dist.isend = self._begin  # type: ignore[assignment]

    def _begin(self, *args: Any) -> _SlowWork:
        work = _SlowWork()
        due = time.monotonic() + self._seconds
        self._waiting.put((due, lambda: work.begin(lambda: self._isend(*args))))
        return work

    def _send_when_due(self) -> None:
        while True:
            due, send = self._waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            send()


class _SlowWork:
    """A send that has perhaps not begun; what the runtime uses of `torch.distributed.Work`."""

    def __init__(self) -> None:
        self._has_begun = threading.Event()
        self._work: dist.Work | None = None
        self._error: RuntimeError | None = None

    def begin(self, send: Callable[[], dist.Work | None]) -> None:
        """Really send."""
        try:
            self._work = send()
        except RuntimeError as error:
            self._error = error
        self._has_begun.set()

    def wait(self, timeout: timedelta) -> bool:
        """Until it is sent."""
        if not self._has_begun.wait(timeout.total_seconds()):
            raise RuntimeError("the delayed send has not begun")
        if self._error is not None:
            raise self._error
        return self._work is None or self._work.wait(timeout)
