"""Stores whose calls block: three methods, from which an executor makes a whole store."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TypeAlias

from kvplug.errors import TransportError, UnsupportedError
from kvplug.transport.store.results import MissReason, Usage
from kvplug.transport.store.store import Store


class PageError(TransportError):
    """One page could not be read or written. Others can be: the store is not taken for gone.

    A page that cannot be read is not promised again until a put has replaced it, unless the reason is
    ``TIMEOUT``, ``CANCELLED``, ``CLOSED`` or ``NO_MEMORY``, which say nothing about the page."""

    def __init__(self, reason: MissReason, message: str = "") -> None:
        super().__init__(message or reason.value)
        self.reason = reason
        """What the page's result says."""


class BlockingStore(abc.ABC):
    """Keeps bytes under keys, by calls that return when they are done.

    Law. :meth:`read` returns bytes of one :meth:`write`, never a mixture, also after a crash in the middle of
    a write. A page that is there is not replaced: the first whole write of a key wins.

    Callers. An executor of kvplug, from several threads at once. It makes the headers and verifies them,
    keeps the deadlines, counts, and tries again after errors. So a method may take its time, and may raise
    whatever its libraries raise:

    - :class:`PageError`: this page is a miss, or is not kept, for its reason.
    - ``ConnectionError``, or an error of a read or write that took more than five seconds: the store is gone.
      Requests are misses, and it is left alone for a while.
    - Any other error: :meth:`has` is called with a key that no page has. If that fails as well, the store is
      gone. Else the call is made once more, except after a ``TimeoutError``; then its page is a miss
      (``UNREADABLE`` or ``TIMEOUT``). A full disk (``ENOSPC``) is no room.

    A page that could not be read is called absent until it was replaced: by :meth:`remove`, :meth:`write` and
    :meth:`read`, in this order, when it is put again.

    Forks. In a forked child kvplug calls no method, not even :meth:`close`. A store that keeps descriptors
    open, such as connections, passes itself to ``kvplug.transport.close_after_fork`` and closes them in
    ``_after_fork_in_child``, where it sends nothing."""

    Context: TypeAlias = Store.Context
    """The argument of its factory."""

    num_threads: int = 4
    """How many calls the executor makes at the same time."""

    is_shared: bool = True
    """Whether every process that makes it with the same options reaches the same pages."""

    location: str = ""
    """Where its pages are kept, for people, without secrets: a folder, a server's address."""

    medium: str = "other"
    """What its pages are kept in: ``"host"`` (memory of this host), ``"disk"`` or ``"other"``."""

    @abc.abstractmethod
    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Whether there is a whole page under each key (32 bytes). One call for a whole prompt.

        If it raises, and the store is there, it is called again for parts of the keys."""

    @abc.abstractmethod
    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """Fill the buffers, one after the other, with the page from its first byte on.

        Returns the length of the whole page in bytes, which may be more or less than the buffers take;
        ``None``: there is none.
        """

    @abc.abstractmethod
    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        """Keep the page, whose bytes are those of the buffers one after the other.

        Returns whether it is there now. False: there is no room for it; the caller goes on without.
        """

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these pages, as far as they are there. Also called for pages whose bytes are wrong.

        Raises:
            UnsupportedError: the store cannot; the default does nothing else.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot remove pages")

    def clear(self) -> None:
        """Forget all pages.

        Raises:
            UnsupportedError: other programs keep theirs here, too.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot forget all its pages at once")

    def keys(self, series: bytes) -> Sequence[bytes]:
        """The keys that are there, of that series (its id) as far as the store can tell them apart.

        Raises:
            UnsupportedError: the store cannot list them; the default does nothing else.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot list what it holds")

    def touch(self, keys: Sequence[bytes]) -> None:
        """The pages were used, and should be kept longer than others."""
        return None

    def usage(self) -> Usage:
        """What the store holds, as far as is known. Must not block."""
        return Usage(num_pages=0, used_bytes=0, budget_bytes=None)

    def close(self) -> None:
        """No call follows. Idempotent."""
        return None
