"""Serves a store to other processes."""

from __future__ import annotations

import logging

from kvplug import ClosedError
from kvplug.transport import StoreLink, close_after_fork, unix_address
from kvplug_host.serving.memory_door import MemoryDoor, open_door
from kvplug_host.serving.session import Session
from kvplug_host.store import HostStore

_log = logging.getLogger(__name__)


class Server:
    """What all peers of one store share: the door for its memory, opened with the first of them."""

    def __init__(self, store: HostStore) -> None:
        """Raises ConfigError, AddressInUseError: it cannot listen at the configured path."""
        self._store = store
        self._door: MemoryDoor | None = None
        options, context = store.options, store.context
        if options.map and store.segments.can_be_mapped:
            address = f"unix:{options.socket}" if options.socket else unix_address(context.host)
            door = open_door(store.segments, address, context.credentials)
            if isinstance(door, MemoryDoor):
                self._door = door
            else:
                _log.warning("readers get copies of the pages: their memory cannot be handed out: %s", door)
        close_after_fork(self)

    def serve(self, link: StoreLink) -> None:
        """Serve one peer, until it is gone or the store is closed."""
        session = Session(self._store, link, self._door)
        try:
            session.run()
        except ClosedError:
            return

    def close(self) -> None:
        """Hand out no more memory."""
        if self._door is not None:
            self._door.close()

    def _after_fork_in_child(self) -> None:
        if self._door is not None:
            self._door.after_fork()
