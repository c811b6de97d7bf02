"""Stores whose calls block. An author writes three methods, and an executor builds a store from them."""

from __future__ import annotations

import abc
from collections.abc import Generator, Sequence
from typing import TypeAlias

from kvplug.errors import TransportError, UnsupportedError
from kvplug.transport.store.results import MissReason, Usage
from kvplug.transport.store.store import Store


class BlockingStore(abc.ABC):
    """Keeps bytes under keys. Each call returns when its work is done.

    Law. :meth:`read` returns bytes of one :meth:`write`, never a mixture, even after a crash in the middle of
    a write. A stored page is not replaced: the first whole write of a key wins.

    Callers. kvplug's executor, from several threads at once. It makes and verifies the headers, enforces
    deadlines, counts requests, and retries after errors. So a method may be slow, and may raise whatever its
    libraries raise:

    - :class:`BlockingStore.PageError`: this page is a miss, or is not kept, for the error's reason.
    - ``ConnectionError``, or an error of a read or write that took more than five seconds: the store is gone.
      Requests end as misses, and the executor does not call the store for a while.
    - Any other error: the executor calls :meth:`has` with an unused key. If that call fails too, the store is
      gone. Otherwise the executor repeats the failed call once, except after a ``TimeoutError``; if it fails
      again, its page is a miss (``UNREADABLE`` or ``TIMEOUT``). A full disk (``ENOSPC``) counts as no room.

    A page that could not be read counts as absent until it is put again. That put calls :meth:`remove`,
    :meth:`write` and :meth:`read`, in this order.

    Forks. In a forked child kvplug calls no method, not even :meth:`close`. A store that keeps descriptors
    open, such as connections, passes itself to ``kvplug.transport.close_after_fork`` and closes them in
    ``_after_fork_in_child``, where it must not send anything."""

    class PageError(TransportError):
        """One page could not be read or written. The store still counts as reachable.

        After an error of a read, lookups report the page as absent until a put has replaced it. The reasons
        ``TIMEOUT``, ``CANCELLED``, ``CLOSED`` and ``NO_MEMORY`` are exceptions: they are not faults of the
        page, and do not change what lookups report."""

        def __init__(self, reason: MissReason, message: str = "") -> None:
            super().__init__(message or reason.value)
            self.reason = reason
            """Why the page is a miss, or was not kept."""

    Context: TypeAlias = Store.Context
    """The argument of the store's factory."""

    num_threads: int = 4
    """How many calls the executor makes at the same time."""

    batch_bytes: int = 0
    """The most bytes of pages that the executor reads or writes with one call of :meth:`read_pages` or
    :meth:`write_pages`. 0: it calls :meth:`read` or :meth:`write` for each page."""

    is_shared: bool = True
    """Whether every process that opens the store with the same options reaches the same pages."""

    location: str = ""
    """Where the store keeps its pages, such as a folder or a server's address. Shown to users; no secrets."""

    medium: str = "other"
    """The medium of its pages: ``"host"`` (memory of this host), ``"disk"`` or ``"other"``."""

    @abc.abstractmethod
    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Whether each key (32 bytes) has a whole page. Called once for a whole prompt.

        If it raises an error while the store can be reached, it is called again for subsets of the keys."""

    @abc.abstractmethod
    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """Fill the buffers in order with the page's bytes, from its first byte on.

        Returns the length of the whole page in bytes, which may be more or less than the buffers hold, or
        ``None`` if the store does not have the page.
        """

    @abc.abstractmethod
    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        """Keep a page: the bytes of the buffers, one after the other.

        Returns whether the store has the page now. False means that there is no room for it.
        """

    def read_pages(
        self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]
    ) -> Generator[tuple[int, int | None], None, None]:
        """Read several pages with few round trips. Only called if ``batch_bytes`` is set.

        Yields, for each page and in any order, its index in ``keys`` and what :meth:`read` returns. The
        buffers of all pages may be the same memory: the executor uses a page before it asks for the next one.
        After an error it calls :meth:`read` for each page that was not yielded.
        """
        for index, (key, buffers) in enumerate(zip(keys, into, strict=True)):
            yield index, self.read(key, buffers)

    def write_pages(self, keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]]) -> Sequence[bool]:
        """Keep several pages with few round trips. Only called if ``batch_bytes`` is set.

        Returns what :meth:`write` returns for each page. After an error the executor calls :meth:`write` for
        each of them.
        """
        return [self.write(key, page) for key, page in zip(keys, pages, strict=True)]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these pages; ignore absent ones. Also called for pages whose bytes are wrong.

        Raises:
            UnsupportedError: the store cannot remove pages. The default always raises it.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot remove pages")

    def clear(self) -> None:
        """Forget all pages.

        Raises:
            UnsupportedError: other programs also keep pages in the store. The default always raises it.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot forget all its pages at once")

    def keys(self, series: bytes) -> Sequence[bytes]:
        """Return the keys that the store has. ``series``: the id of their series, for a store that can
        filter by it.

        Raises:
            UnsupportedError: the store cannot list its keys. The default always raises it.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot list what it holds")

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the pages were used, and should be kept longer than others."""
        return None

    def usage(self) -> Usage:
        """Return what the store holds, as far as it knows. Must not block."""
        return Usage(num_pages=0, used_bytes=0, budget_bytes=None)

    def close(self) -> None:
        """Close the store. No other call follows. Idempotent."""
        return None
