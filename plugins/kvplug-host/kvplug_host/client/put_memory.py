"""Memory for the pages of puts, which this process writes and the store maps."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from kvplug import CapacityError
from kvplug.transport import (
    Connection,
    Deadline,
    Memfd,
    NamedExhaustion,
    Segment,
    WireError,
    close_after_fork,
)
from kvplug_host.protocol import REGION_BYTES, REGIONS


class PutMemory:
    """Regions of shared memory. One that was filled is free again when the store has read it. Thread-safe."""

    def __init__(self, connection: Connection, ticket: bytes, deadline: Deadline) -> None:
        """Send the ticket to the store, with the descriptor of this memory.

        Raises:
            KvplugError: the system has not the memory, or the store does not take it.
        """
        nbytes = REGIONS * REGION_BYTES
        with NamedExhaustion("shared memory for the pages of puts", CapacityError):
            fd = Memfd.create("kvplug-host", nbytes)
        try:
            self._view = Segment.map(fd, nbytes, writable=True).view
            Memfd.seal(fd, read_only=True)
            connection.send(ticket, deadline, (fd,))
        finally:
            os.close(fd)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._free = list(range(REGIONS))
        """The last one was used last: it may still be in a cache."""
        self._is_over = False
        close_after_fork(self)

    def take(self, nbytes: int) -> tuple[int, memoryview] | None:
        """Wait for a free region, and return its number and its first ``nbytes``. ``None``: a region has
        fewer bytes, or the store is gone."""
        if nbytes > REGION_BYTES:
            return None
        with self._lock:
            self._changed.wait_for(lambda: self._free or self._is_over)
            if self._is_over:
                return None
            region = self._free.pop()
            begin = region * REGION_BYTES
            return region, self._view[begin : begin + nbytes]

    def give_back(self, regions: Iterable[int]) -> None:
        """The store does not read these regions any more. Raises WireError: they were not taken."""
        with self._lock:
            for region in regions:
                if region >= REGIONS or region in self._free:
                    raise WireError(f"a message of a store: region {region} of the memory was not in use")
                self._free.append(region)
            self._changed.notify_all()

    def end(self) -> None:
        """Wake the threads that wait for a region. Idempotent."""
        with self._lock:
            self._is_over = True
            self._changed.notify_all()

    def _after_fork_in_child(self) -> None:
        self._is_over = True
