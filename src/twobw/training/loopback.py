"""The meeting place of ranks that are all on this machine: it listens on the loopback only, where
torch's own would listen to the whole network."""

from __future__ import annotations

import socket
from contextlib import suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ADDRESS = "127.0.0.1"
BACKEND = "twobw-loopback"
"""What `LaunchConfig.rdzv_backend` calls this, once `register` was called."""


def loopback_store(port: int = 0) -> TCPStore:
    """A store of this process that others of this machine can reach.

    Args:
        port: 0 takes one that is free; the store's ``port`` tells which.

    Raises:
        OSError: the port is in use.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store's from here on
    return TCPStore(
        ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of torch's agent with nobody else, since all ranks are its own."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = loopback_store()

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks meet in this store."""
        return True

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """The agent alone, at once."""
        where = RendezvousStoreInfo(ADDRESS, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """It stays open."""
        return False

    def set_closed(self) -> None:
        """It stays open."""

    def num_nodes_waiting(self) -> int:
        """Nobody else may come."""
        return 0

    def get_run_id(self) -> str:
        """Of the launch."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the store goes with its process."""
        return True


def register() -> None:
    """Let torch's launcher know of it."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return LoopbackRendezvous(parameters.run_id)

    with suppress(ValueError):  # it does already
        rendezvous_handler_registry.register(BACKEND, create)
