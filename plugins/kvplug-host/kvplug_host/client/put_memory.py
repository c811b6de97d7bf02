"""Memory for the pages of puts, which this process writes and the store maps."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from kvplug.transport import Connection, Deadline, WireError, close_after_fork
from kvplug_host.arena.segments import Segments
from kvplug_host.protocol import REGION_BYTES, REGIONS


class PutMemory:
    """Regions of shared memory. One that was filled is free again when the store has read it. Thread-safe.

    Raises:
        KvplugError: the system has not the memory.
    """

    def __init__(self) -> None:
        self._memory = Segments(1, REGIONS * REGION_BYTES)
        self._memory.grow()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._free = list(range(REGIONS))
        """The last one was used last: it may still be in a cache."""
        self._is_over = False
        close_after_fork(self)

    def hand_over(self, connection: Connection, ticket: bytes, deadline: Deadline) -> None:
        """Send the ticket with the descriptor of this memory. Raises as :meth:`Connection.send`."""
        fd = self._memory.descriptor(0)
        try:
            connection.send(ticket, deadline, (fd,))
        finally:
            os.close(fd)

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
            return region, self._memory.view[begin : begin + nbytes]

    def give_back(self, regions: Iterable[int]) -> None:
        """The store does not read these regions any more. Raises WireError: they were not taken."""
        with self._lock:
            for region in regions:
                if region >= REGIONS or region in self._free:
                    raise WireError(f"a message of a store: region {region} of the memory was not in use")
                self._free.append(region)
            self._changed.notify_all()

    def end(self) -> None:
        """Wake the threads that wait for a region. The memory lives on while it is being filled."""
        with self._lock:
            self._is_over = True
            self._changed.notify_all()
        self._memory.close()

    def _after_fork_in_child(self) -> None:
        self._is_over = True
