"""The lookup buffer "memory": a fake for the tests of one process, and the first subject of its suite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    Entry,
    LookupBuffer,
    LookupContext,
    LookupEndpoint,
    LookupStore,
    Pipe,
    Timeout,
    close_after_fork,
)
from kvplug_testing.memory.entries import copy_of
from kvplug_testing.memory.lookup_calls import AttachedClient, MemoryLookupBuffer, MemoryRemoteStore, Wanted
from kvplug_testing.memory.store_core import StoreCore


class MemoryLookupEndpoint(LookupEndpoint):
    """The factory of the spec."""

    def __init__(self, context: LookupContext) -> None:
        self._context = context

    def hold(self) -> LookupStore:
        return MemoryStore(self._context)

    def reach(self, signal: Pipe, data: Pipe) -> LookupBuffer:
        return MemoryRemoteStore(signal, data, timeout_s=self._context.timeout_s)


class MemoryStore(StoreCore, MemoryLookupBuffer, LookupStore):
    """The end that holds the entries."""

    def __init__(self, context: LookupContext) -> None:
        super().__init__(max_bytes=context.buffer_size, timeout_s=context.timeout_s)
        self._clients: list[AttachedClient] = []
        close_after_fork(self)

    @property
    def is_lost(self) -> bool:
        return self._closed

    @contextmanager
    def _store_for_call(self, deadline: Deadline) -> Iterator[StoreCore]:
        yield self

    def _copied(self, entry: Entry, wanted: Wanted, deadline: Deadline) -> Entry:
        return copy_of(entry)

    # -- remote ends, and the end --------------------------------------------------------------

    def attach(self, signal: Pipe, data: Pipe) -> None:
        client = AttachedClient(self, signal, data, self._forget)
        with self._changed:
            self._check_open()
            self._clients.append(client)
        client.announce()

    def _forget(self, client: AttachedClient) -> None:
        """The client has ended. Wakes its waiting calls."""
        with self._changed:
            if client in self._clients:
                self._clients.remove(client)
            self._changed.notify_all()

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._leases, deadline.remaining())
        self.abort()

    def abort(self) -> None:
        with self._changed:
            self._closed = True
            self._remove_all()
            clients = list(self._clients)
        for client in clients:
            client.end()

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # a thread of the parent may hold the old one
        self._closed = True
        self._clients = []
