"""A store around another store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.transport.store.events import PageEvent
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.keys import Series
from kvplug.transport.store.memory import PageBuffers, PageMemory
from kvplug.transport.store.results import Presence, PutReason, Usage
from kvplug.transport.store.store import PageRequest, Store, StoreLink


class StoreWrapper(Store):
    """Is another store in everything that a subclass does not change."""

    def __init__(self, store: Store) -> None:
        """Owns ``store`` from here on."""
        self.store = store
        """The store inside."""
        self.seal = store.seal

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self.store!r}>"

    @property
    def is_shared(self) -> bool:
        return self.store.is_shared

    @property
    def medium(self) -> str:
        return self.store.medium

    @property
    def location(self) -> str:
        return self.store.location

    @property
    def route(self) -> str:
        return self.store.route

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        return self.store.submit_lookup(keys, lease_s=lease_s, timeout=timeout)

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        return self.store.submit_put(pages, timeout=timeout)

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        return self.store.submit_get(pages, timeout=timeout)

    def allocate(self, series: Series, count: int) -> PageBuffers | None:
        return self.store.allocate(series, count)

    def free(self, memory: PageBuffers) -> None:
        self.store.free(memory)

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.store.declare(series, keys, timeout=timeout)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self.store.withdraw(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        self.store.release(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.store.touch(keys)

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        self.store.expect_reader(keys)

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        return self.store.submit_remove(keys, timeout=timeout)

    def keys(self, series: Series) -> Sequence[bytes]:
        return self.store.keys(series)

    def usage(self) -> Usage:
        return self.store.usage()

    @property
    def has_events(self) -> bool:
        return self.store.has_events

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        return self.store.subscribe(listener)

    def serve(self, link: StoreLink) -> None:
        self.store.serve(link)

    def register_memory(self, memory: PageMemory) -> None:
        self.store.register_memory(memory)

    @property
    def is_lost(self) -> bool:
        return self.store.is_lost

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.store.close(timeout)

    def abort(self) -> None:
        self.store.abort()
