"""Serves a store to other processes."""

from __future__ import annotations

import logging
import threading

from kvplug import TransportError
from kvplug.transport import Address, Store
from kvplug_host.options import HostOptions
from kvplug_host.pages.pages import Pages
from kvplug_host.serving.memory_door import MemoryDoor
from kvplug_host.serving.session import Session

_log = logging.getLogger(__name__)


class Server:
    """What all peers of one store share: the door for its memory, which opens for the first of them."""

    def __init__(self, pages: Pages, context: Store.Context, options: HostOptions) -> None:
        self._pages = pages
        self._context = context
        self._options = options
        self._lock = threading.Lock()
        self._door: MemoryDoor | None = None
        self._is_opened = self._closed = False

    def serve(self, link: Store.Link) -> None:
        """Serve one peer, until it is gone or the link is closed.

        Raises:
            KvplugError: the memory cannot be handed out at the configured path.
        """
        Session(self._pages, link, self._opened(), self._context).run()

    def _opened(self) -> MemoryDoor | None:
        """The door; ``None``: the memory is not handed out."""
        options, context, segments = self._options, self._context, self._pages.segments
        with self._lock:
            if not self._is_opened and not self._closed and options.map:
                address = f"unix:{options.socket}" if options.socket else Address.beside(context.host)
                try:
                    self._door = MemoryDoor(segments, address, context.credentials)
                except TransportError as e:
                    _log.warning("readers get copies of the pages: their memory cannot be handed out: %s", e)
                self._is_opened = True
            return self._door

    def close(self) -> None:
        """Hand out no more memory."""
        with self._lock:
            self._closed = True
            door, self._door = self._door, None
        if door is not None:
            door.close()
