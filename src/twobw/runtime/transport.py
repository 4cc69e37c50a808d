"""`Transport`: what carries messages between stages; and the one for stages that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from twobw.runtime.messages import Message

if TYPE_CHECKING:
    from twobw.runtime.watchdog import Activity


class Channel(IntEnum):
    """Streams between two stages; each keeps its own order."""

    ACTIVATION = 0
    GRADIENT = 1
    CONTROL = 2
    LOSS = 3
    METRICS = 4
    STATE = 5


WHAT = {
    Channel.ACTIVATION: "an activation",
    Channel.GRADIENT: "a gradient",
    Channel.CONTROL: "the start of a batch",
    Channel.LOSS: "a batch's loss",
    Channel.METRICS: "a batch's metrics",
    Channel.STATE: "state (weights, spans)",
}
"""What passes on a channel, for messages."""


class TransportError(RuntimeError):
    """A peer cannot be reached, did not answer in time, or sent what was not agreed."""


class Note(Protocol):
    """Numbers on their way here."""

    def wait(self) -> list[float]:
        """The numbers, when they have arrived."""
        ...


@dataclass(frozen=True, slots=True)
class Known:
    """Numbers that are here already."""

    numbers: list[float]

    def wait(self) -> list[float]:
        """See `Note`."""
        return self.numbers


@dataclass(frozen=True, slots=True)
class Promised:
    """Numbers that this rank's other thread is making."""

    future: Future[list[float]]
    activity: Activity

    def wait(self) -> list[float]:
        """See `Note`."""
        return self.activity.result(self.future, "the loss, which its reduction thread adds up")


class Transport(Protocol):
    """Carries messages between the stages of one pipeline. Sends do not block.

    A message's ``key`` stands for its layout: once a message of a key has passed on a channel,
    later ones of that key have the same layout, so that they can be received ahead. ``None``
    promises nothing.
    """

    def send(self, peer: int, channel: Channel, key: int | None, message: Message) -> None:
        """Send to stage ``peer``."""
        ...

    def expect(self, peer: int, channel: Channel, key: int | None) -> None:
        """Announce that a message of ``key`` will be received after those expected before."""
        ...

    def receive(self, peer: int, channel: Channel) -> Message:
        """The oldest message expected.

        Raises:
            TransportError: the peer is gone, or nothing came in time.
        """
        ...

    def push(self, peer: int, channel: Channel, numbers: Sequence[float]) -> None:
        """Send a few numbers."""
        ...

    def listen(self, peer: int, channel: Channel, count: int) -> Note:
        """Expect ``count`` numbers, in the order of the peer's pushes."""
        ...

    def fail(self, reason: str) -> None:
        """Tell the peers that this stage has failed, where they cannot see it themselves."""
        ...


class ThreadHub:
    """What the `ThreadTransport`s of one process share: a queue a direction and channel."""

    def __init__(self, num_stages: int) -> None:
        stages = range(num_stages)
        self._queues: dict[tuple[int, int, Channel], SimpleQueue[object]] = {
            key: SimpleQueue() for key in product(stages, stages, Channel)
        }

    def put(self, source: int, target: int, channel: Channel, item: object) -> None:
        """Send ``item``; never blocks."""
        self._queues[source, target, channel].put(item)

    def get(self, source: int, target: int, channel: Channel, timeout: float) -> object:
        """The oldest item sent.

        Raises:
            RuntimeError: the source has failed.
            TimeoutError: nothing came within ``timeout`` seconds.
        """
        waiting = self._queues[source, target, channel]
        try:
            item = waiting.get(timeout=timeout)
        except Empty:
            raise TimeoutError("nothing came") from None
        if isinstance(item, _Failure):
            waiting.put(item)
            raise RuntimeError(f"it has failed: {item.reason}")
        return item

    def fail(self, source: int, reason: str) -> None:
        """Wake whoever waits for ``source``, now or later."""
        for key, waiting in self._queues.items():
            if key[0] == source:
                waiting.put(_Failure(reason))


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str


@dataclass(slots=True)
class _ThreadNote:
    transport: ThreadTransport
    source: int
    channel: Channel

    def wait(self) -> list[float]:
        numbers = self.transport.get(self.source, self.channel)
        assert isinstance(numbers, list)
        return numbers


class ThreadTransport:
    """For stages that are threads of one process. Copies, so that no stage can change what
    another one still needs.

    Args:
        hub: shared with the other stages.
        ranks: global rank of each stage (or replica) that it connects.
        stage: this rank's place among them.
        activity: where waits are noted.
    """

    def __init__(
        self, hub: ThreadHub, ranks: Sequence[int], stage: int, activity: Activity
    ) -> None:
        self._hub = hub
        self._ranks = ranks
        self._stage = stage
        self._activity = activity

    def send(self, peer: int, channel: Channel, key: int | None, message: Message) -> None:
        """See `Transport`."""
        copies = tuple(None if tensor is None else tensor.clone() for tensor in message.tensors)
        self._hub.put(self._stage, peer, channel, Message(copies, message.layout))

    def expect(self, peer: int, channel: Channel, key: int | None) -> None:
        """Nothing to do: a queue takes what comes."""

    def receive(self, peer: int, channel: Channel) -> Message:
        """See `Transport`."""
        message = self.get(peer, channel)
        assert isinstance(message, Message)
        return message

    def push(self, peer: int, channel: Channel, numbers: Sequence[float]) -> None:
        """See `Transport`."""
        self._hub.put(self._stage, peer, channel, list(numbers))

    def listen(self, peer: int, channel: Channel, count: int) -> Note:
        """See `Transport`."""
        return _ThreadNote(self, peer, channel)

    def get(self, peer: int, channel: Channel) -> object:
        """The oldest item that ``peer`` has sent.

        Raises:
            TransportError: it has failed, or nothing came in time.
        """
        with self._activity.waiting(f"{WHAT[channel]} from", [self._ranks[peer]]):
            return self._hub.get(peer, self._stage, channel, self._activity.limit)

    def fail(self, reason: str) -> None:
        """See `Transport`."""
        self._hub.fail(self._stage, reason)
