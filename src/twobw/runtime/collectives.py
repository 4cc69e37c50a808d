"""`Collective`: a group of ranks that add or gather together: threads, or processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from threading import Barrier, BrokenBarrierError
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from twobw.runtime.watchdog import Activity

Operation = Literal["sum", "max", "min"]


class Collective(Protocol):
    """A group of ranks. Every member makes the same calls in the same order, one at a time."""

    size: int
    index: int

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Make ``tensor``, in place, the sum (or other) over all members: the same bits for all."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every member's ``tensor``, all of one shape and dtype, in the members' order."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Make ``tensor``, in place, that of member ``source``."""
        ...

    def fail(self) -> None:
        """Wake the members that wait, where they cannot see this one's failure themselves."""
        ...


class Alone:
    """The group of one rank."""

    size = 1
    index = 0

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """See `Collective`."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Collective`."""
        return [tensor]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """See `Collective`."""

    def fail(self) -> None:
        """See `Collective`."""


class DistributedCollective:
    """A process group of torch.distributed.

    Args:
        group: the process group.
        device: what it works on; tensors that are elsewhere (a flag, a norm) go there and back.
        activity: where waits are noted, and which has their limit; NCCL's is that of the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, activity: Activity) -> None:
        self._group = group
        self._device = device
        self._activity = activity
        self._ranks = dist.get_process_group_ranks(group)
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """See `Collective`."""
        kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        here = tensor.to(self._device)
        with self._waiting(operation, tensor):
            self._wait(dist.all_reduce(here, kinds[operation], self._group, async_op=True))
        if here is not tensor:
            tensor.copy_(here)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Collective`."""
        here = tensor.to(self._device)
        gathered = [torch.empty_like(here) for _ in range(self.size)]
        with self._waiting("gathering", tensor):
            self._wait(dist.all_gather(gathered, here, self._group, async_op=True))
        return [each.to(tensor.device) for each in gathered]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """See `Collective`."""
        with self._waiting("broadcast", tensor):
            work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
            self._wait(work)

    def fail(self) -> None:
        """Nothing to do: when this rank ends, the others see the connection close."""

    def _waiting(self, what: str, tensor: Tensor) -> AbstractContextManager[None]:
        return self._activity.waiting(_wait_text(what, tensor), self._ranks)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is in the group"
        if self._device.type == "cuda":
            work.wait()  # given a limit, it would block the host rather than the stream
        else:
            work.wait(timedelta(seconds=self._activity.limit))


class ThreadMeeting:
    """Where the members of a group of threads meet."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self._barrier = Barrier(size, timeout=timeout)
        self._given: list[Tensor | None] = [None] * size

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Copies of what every member gave, in the members' order.

        Raises:
            RuntimeError: a member has failed or did not come in time.
        """
        try:
            self._given[index] = tensor
            self._barrier.wait()
            copies = [given.clone() for given in self._given if given is not None]
            self._barrier.wait()
        except BrokenBarrierError:
            raise RuntimeError("a member of the group has failed or is late") from None
        return copies

    def fail(self) -> None:
        """Wake the others."""
        self._barrier.abort()


class ThreadCollective:
    """One thread's membership in a `ThreadMeeting`.

    Args:
        meeting: shared by the members.
        ranks: their global ranks.
        index: this one's place among them.
        activity: where waits are noted.
    """

    def __init__(
        self, meeting: ThreadMeeting, ranks: Sequence[int], index: int, activity: Activity
    ) -> None:
        self._meeting = meeting
        self._ranks = ranks
        self._activity = activity
        self.size = meeting.size
        self.index = index

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """See `Collective`."""
        first, *others = self._exchange(operation, tensor)
        for other in others:
            if operation == "sum":
                first.add_(other)
            else:
                limit = torch.maximum if operation == "max" else torch.minimum
                first = limit(first, other)
        tensor.copy_(first)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Collective`."""
        return self._exchange("gathering", tensor)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """See `Collective`."""
        tensor.copy_(self._exchange("broadcast", tensor)[source])

    def fail(self) -> None:
        """See `Collective`."""
        self._meeting.fail()

    def _exchange(self, what: str, tensor: Tensor) -> list[Tensor]:
        with self._activity.waiting(_wait_text(what, tensor), self._ranks):
            return self._meeting.exchange(self.index, tensor)


def _wait_text(what: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"the {what} of {dtype}{list(tensor.shape)} over"


def same_everywhere(group: Collective, tensors: Sequence[Tensor]) -> bool:
    """Whether all members have the same ``tensors``, to the bit; all get the same answer."""
    differs = torch.zeros(1)
    for tensor in tensors:
        bits = tensor.reshape(-1).view(torch.uint8)
        lowest = bits.clone()
        group.all_reduce(lowest, "min")
        if not torch.equal(lowest, bits):
            differs.fill_(1)
    group.all_reduce(differs, "max")
    return not differs.item()
