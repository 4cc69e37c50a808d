"""`DistributedTransport`: messages between stages that are ranks of a process group.

What was probed of gloo (torch 2.13) and shapes this file: nothing leaves before the receive is
posted, so receives are posted ahead; `is_completed` stays false until `wait`, so it is not asked;
a wrong size is accepted silently, so layouts are agreed by header and checked by the sender.
NCCL ignores tags, and one communicator for both directions can stall (PyTorch issues 172668,
188833), so each directed edge has a group of its own there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from twobw.runtime.messages import Layout, Message
from twobw.runtime.transport import WHAT, Channel, Note, TransportError
from twobw.runtime.watchdog import Activity

MAX_POSTED = 2
"""Receives posted ahead on a channel: one being filled while the other is waited for."""

MAX_UNSENT = 2
"""Sends under way on a channel before the oldest is waited for. A peer posts its receives in
program order, so that this never deadlocks where the schedule does not."""

_TAG = 7200  # keeps these messages apart from the user's own point-to-point traffic


@dataclass(slots=True)
class _Incoming:
    """A message expected: posted once its layout is known."""

    key: int | None
    layout: Layout | None = None
    tensors: tuple[Tensor | None, ...] = ()
    works: list[dist.Work] = field(default_factory=list)


@dataclass(slots=True)
class _DistributedNote:
    transport: DistributedTransport
    peer: int
    channel: Channel
    numbers: Tensor
    work: dist.Work | None

    def wait(self) -> list[float]:
        if self.work is not None:
            self.transport.wait(self.work, self.peer, self.channel)
            self.work = None
        return [float(number) for number in self.numbers.tolist()]


class DistributedTransport:
    """One rank's end.

    Args:
        ranks: global rank of each stage of this pipeline.
        stage: this rank's.
        device: where messages are received.
        groups: process group of each directed edge ``(source stage, target stage)`` for tensors,
            where they need one of their own (NCCL); others use ``control_group``.
        control_group: a group of all ranks for numbers on the CPU (gloo); ``None`` is the
            default group.
        activity: where waits are noted.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        *,
        device: torch.device,
        groups: dict[tuple[int, int], dist.ProcessGroup],
        control_group: dist.ProcessGroup | None,
        activity: Activity,
    ) -> None:
        self._ranks = list(ranks)
        self._stage = stage
        self._device = device
        self._groups = groups
        self._control_group = control_group
        self._activity = activity
        self._incoming: dict[tuple[int, Channel], deque[_Incoming]] = {}
        self._layouts: dict[tuple[int, int, Channel, int], Layout] = {}
        self._unsent: dict[tuple[int, Channel], deque[tuple[list[dist.Work], object]]] = {}

    def send(self, peer: int, channel: Channel, key: int | None, message: Message) -> None:
        """See `Transport`.

        Raises:
            TransportError: the layout differs from that of the key's earlier messages.
        """
        works: list[dist.Work] = []
        kept: list[Tensor] = []
        layout = self._layouts.get((self._stage, peer, channel, key)) if key is not None else None
        if layout is None:
            layout = message.layout
            header = layout.encode()
            for numbers in ([len(header)], header):
                kept.append(torch.tensor(numbers, dtype=torch.int64))
                works.append(self._isend(kept[-1], peer, channel, self._control_group))
            if key is not None:
                self._layouts[self._stage, peer, channel, key] = layout
        tensors = _fitted(message, layout, self._device)
        group = self._groups.get((self._stage, peer), self._control_group)
        for tensor in tensors:
            kept.append(tensor)
            works.append(self._isend(tensor, peer, channel, group))
        self._keep(peer, channel, works, kept)

    def expect(self, peer: int, channel: Channel, key: int | None) -> None:
        """See `Transport`."""
        self._incoming.setdefault((peer, channel), deque()).append(_Incoming(key))
        self._post_ahead(peer, channel)

    def receive(self, peer: int, channel: Channel) -> Message:
        """See `Transport`."""
        incoming = self._incoming[peer, channel][0]
        if incoming.layout is None:
            layout = self._receive_header(peer, channel)
            if incoming.key is not None:
                self._layouts[peer, self._stage, channel, incoming.key] = layout
            self._post(peer, channel, incoming, layout)
        assert incoming.layout is not None
        for work in incoming.works:
            self.wait(work, peer, channel)
        self._incoming[peer, channel].popleft()
        self._post_ahead(peer, channel)
        return Message(incoming.tensors, incoming.layout)

    def push(self, peer: int, channel: Channel, numbers: Sequence[float]) -> None:
        """See `Transport`."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        work = self._isend(tensor, peer, channel, self._control_group)
        self._keep(peer, channel, [work], tensor)

    def listen(self, peer: int, channel: Channel, count: int) -> Note:
        """See `Transport`."""
        numbers = torch.empty(count, dtype=torch.float64)
        work = self._irecv(numbers, peer, channel, self._control_group)
        return _DistributedNote(self, peer, channel, numbers, work)

    def fail(self, reason: str) -> None:
        """Nothing to do: when this rank ends, its peers see the connection close."""

    def wait(self, work: dist.Work, peer: int, channel: Channel, direction: str = "from") -> None:
        """Wait for ``work`` at most the time-out.

        Raises:
            TransportError: the peer is gone or silent.
        """
        limit = timedelta(seconds=self._activity.limit)
        with self._activity.waiting(f"{WHAT[channel]} {direction}", [self._ranks[peer]]):
            # NCCL, given a limit, would block the host rather than the stream; its watchdog has one
            is_nccl = self._device.type == "cuda" and bool(self._groups)
            done = work.wait() if is_nccl else work.wait(limit)
        assert done, "a work that is waited for is done, or raises"

    def _receive_header(self, peer: int, channel: Channel) -> Layout:
        length = torch.empty(1, dtype=torch.int64)
        self.wait(self._irecv(length, peer, channel, self._control_group), peer, channel)
        header = torch.empty(int(length), dtype=torch.int64)
        self.wait(self._irecv(header, peer, channel, self._control_group), peer, channel)
        return Layout.decode(header.tolist())

    def _post_ahead(self, peer: int, channel: Channel) -> None:
        """Post the next receives, up to the first whose layout is not known."""
        waiting = self._incoming[peer, channel]
        for incoming in list(waiting)[:MAX_POSTED]:
            if incoming.layout is not None:
                continue
            if incoming.key is None:
                return
            layout = self._layouts.get((peer, self._stage, channel, incoming.key))
            if layout is None:
                return
            self._post(peer, channel, incoming, layout)

    def _post(self, peer: int, channel: Channel, incoming: _Incoming, layout: Layout) -> None:
        incoming.layout = layout
        incoming.tensors = tuple(
            None if t is None else t.empty(self._device) for t in layout.tensors
        )
        group = self._groups.get((peer, self._stage), self._control_group)
        incoming.works = [
            self._irecv(tensor.permute(expected.order), peer, channel, group)
            for tensor, expected in zip(incoming.tensors, layout.tensors, strict=True)
            if tensor is not None and expected is not None and tensor.numel() > 0
        ]

    def _keep(self, peer: int, channel: Channel, works: list[dist.Work], kept: object) -> None:
        """Hold what is being sent; wait for the oldest where too much is under way."""
        unsent = self._unsent.setdefault((peer, channel), deque())
        unsent.append((works, kept))
        if len(unsent) > MAX_UNSENT:
            for work in unsent.popleft()[0]:
                self.wait(work, peer, channel, "taken by")

    def _isend(
        self, tensor: Tensor, peer: int, channel: Channel, group: dist.ProcessGroup | None
    ) -> dist.Work:
        return self._begin(dist.isend, tensor, peer, channel, group)

    def _irecv(
        self, tensor: Tensor, peer: int, channel: Channel, group: dist.ProcessGroup | None
    ) -> dist.Work:
        return self._begin(dist.irecv, tensor, peer, channel, group)

    def _begin(
        self,
        transfer: Callable[..., dist.Work | None],
        tensor: Tensor,
        peer: int,
        channel: Channel,
        group: dist.ProcessGroup | None,
    ) -> dist.Work:
        with self._activity.waiting(f"a way for {WHAT[channel]} to or from", [self._ranks[peer]]):
            work = transfer(tensor, self._ranks[peer], group, _TAG + channel)
        assert work is not None, "this rank is in the group"
        return work


def _fitted(message: Message, layout: Layout, device: torch.device) -> list[Tensor]:
    """The tensors to send for ``layout``: a gradient that is not there this time is zeros.

    Raises:
        TransportError: the message does not fit the layout.
    """
    tensors: list[Tensor] = []
    if len(layout.tensors) != len(message.tensors):
        raise _changed(message, layout)
    for tensor, expected, given in zip(
        message.tensors, layout.tensors, message.layout.tensors, strict=True
    ):
        if expected is None and tensor is None:
            continue
        if expected is None or (given is not None and not given.fits(expected)):
            raise _changed(message, layout)
        if tensor is None:
            tensor = torch.zeros(expected.shape, dtype=expected.dtype, device=device)
        if tensor.numel() > 0:
            tensors.append(tensor.permute(expected.order).contiguous())
    return tensors


def _changed(message: Message, layout: Layout) -> TransportError:
    return TransportError(
        f"a stage gave {message.layout} where it gave {layout} before for inputs of the same "
        "shapes; what a stage gives may depend on the shapes of its inputs only"
    )
