"""The calls of a blocking store. Distinguishes errors of one page from errors of the whole store.

A store may raise whatever its libraries raise. A ``ConnectionError`` means that the store is gone. After any
other error the store is asked once for an unused key. If that raises as well, the store is gone; otherwise
the call is repeated once, and a second error concerns its page only.

A page that could not be read is remembered: lookups report it as absent until a put has replaced it. It is
read again now and then, since another process may have replaced it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeVar

import attrs

from kvplug.errors import CapacityError, ClosedError, UnsupportedError
from kvplug.net.exhaustion import SPACE, NamedExhaustion
from kvplug.net.log import LogEvent
from kvplug.net.threads import ExitGuard
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.engine import in_words
from kvplug.transport.store.results import MissReason

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MAX_UNREADABLE: Final = 1 << 14
"""How many unreadable pages are remembered. A forgotten page is tried again, and fails once more."""
_SLOW_S: Final = 5.0
"""A call that failed after more seconds than this is not repeated: it may have waited for a lock."""
_RETRY_S: Final = 30.0
"""Seconds before an unreadable page is read again."""
_PASSING: Final = frozenset(
    {MissReason.TIMEOUT, MissReason.CANCELLED, MissReason.CLOSED, MissReason.NO_MEMORY}
)
"""Reasons that do not concern the page."""


@attrs.define
class _Unreadable:
    nbytes: int
    retry_at: float


class PageCalls:
    """The calls of one blocking store. Threads may share it. An error that a method's docstring does not list
    means that the store is gone, or that the process has run out of a resource."""

    def __init__(self, store: BlockingStore, name: str) -> None:
        """``name``: the store's name, for messages."""
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._unreadable: OrderedDict[bytes, _Unreadable] = OrderedDict()
        self._reported: set[tuple[object, ...]] = set()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a readable page, as far as is known.

        Raises:
            BlockingStore.PageError: raised by the store.
        """
        held = self._held(keys, is_first=True)
        if self._unreadable:
            for index, key in enumerate(keys):
                if held[index] and (unreadable := self._unreadable.get(key)) is not None:
                    held[index] = self._can_be_read_now(key, unreadable)
                elif not held[index]:
                    self.forget(key)  # the store no longer has the page
        return held

    def _held(self, keys: Sequence[bytes], *, is_first: bool = False) -> list[bool]:
        """Whether the store has each key. If the call fails, asks for halves, to isolate the bad keys."""
        try:
            found = [bool(each) for each in self._store.has(keys)][: len(keys)]
            return found + [False] * (len(keys) - len(found))
        except ConnectionError:
            raise
        except BlockingStore.PageError as e:
            if e.reason not in _PASSING:
                self._report("cannot look for some pages, which count as absent", e)
            raise
        except Exception as e:
            if is_first or isinstance(e, TimeoutError):
                self._raise_if_gone(e)
            if len(keys) < 2:
                self._report("cannot look for some pages, which count as absent", e)
                return [False] * len(keys)
        half = len(keys) // 2
        return self._held(keys[:half]) + self._held(keys[half:])

    def _can_be_read_now(self, key: bytes, unreadable: _Unreadable) -> bool:
        """Whether an unreadable page can be read again. Tries that at most every ``_RETRY_S`` seconds."""
        if time.monotonic() < unreadable.retry_at:
            return False
        unreadable.retry_at = time.monotonic() + _RETRY_S
        try:
            if self._store.read(key, (memoryview(bytearray(unreadable.nbytes)),)) is None:
                return False
        except Exception:
            return False
        self.forget(key)
        return True

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """:meth:`BlockingStore.read`.

        Raises:
            BlockingStore.PageError: the page cannot be read.
        """
        what = "has pages that cannot be read; they are misses"
        try:
            return self._tried(lambda: self._read(key, into), what, MissReason.UNREADABLE)
        except BlockingStore.PageError as e:
            if e.reason not in _PASSING:
                self.is_unreadable(key, sum(map(len, into)))
            raise

    def _read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        length = self._store.read(key, into)
        if length is None and self._store.has((key,))[0]:
            length = self._store.read(key, into)  # the page may have been written in between
            if length is None:
                raise BlockingStore.PageError(
                    MissReason.UNREADABLE, "the store has the page but returns nothing"
                )
        return length

    def read_pages(
        self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]
    ) -> Generator[tuple[int, int | None], None, None]:
        """:meth:`BlockingStore.read_pages`. Ends early if :meth:`read` must be called for the other pages."""
        began = time.monotonic()
        try:
            with contextlib.closing(self._store.read_pages(keys, into)) as found:
                for each in found:
                    yield each
                    began = time.monotonic()
        except Exception as e:
            if not isinstance(e, BlockingStore.PageError):
                self._raise_if_gone(e, began)

    def are_absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page that :meth:`read_pages` did not find is absent. The others need :meth:`read`.

        Raises:
            BlockingStore.PageError: raised by the store.
        """
        return [not held for held in self._held(keys, is_first=True)] if keys else []

    def _tried(
        self,
        call: Callable[[], T],
        what: str,
        reason: MissReason,
        *,
        expected: tuple[type[Exception], ...] = (),
        is_last: bool = False,
    ) -> T:
        """Make a call for one page, and repeat it once after an error, since only a connection may have been
        lost.

        Args:
            what: what the store does if the call fails, for the log.
            reason: why the page is lost if the call fails twice.
            expected: errors to raise unchanged.

        Raises:
            BlockingStore.PageError: the page is lost.
        """
        began = time.monotonic()
        try:
            return call()
        except BlockingStore.PageError as e:
            if e.reason not in _PASSING:
                self._report(what, e)
            raise
        except expected:
            raise
        except Exception as e:
            self._raise_if_gone(e, began)
            is_late = isinstance(e, TimeoutError)
            if is_last or is_late:
                self._report(what, e)
                raise BlockingStore.PageError(MissReason.TIMEOUT if is_late else reason, in_words(e)) from e
        return self._tried(call, what, reason, expected=expected, is_last=True)

    def is_unreadable(self, key: bytes, nbytes: int) -> None:
        """Note that the page under the key cannot be used. ``nbytes``: its length."""
        with self._lock:
            self._unreadable[key] = _Unreadable(nbytes, time.monotonic() + _RETRY_S)
            if len(self._unreadable) > _MAX_UNREADABLE:
                self._unreadable.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Note that the page is absent or readable."""
        if self._unreadable:
            with self._lock:
                self._unreadable.pop(key, None)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        """:meth:`BlockingStore.write`, which also replaces an unreadable page under the key.

        Raises:
            CapacityError, PermissionError: raised by the store.
            BlockingStore.PageError: the page cannot be written, or the one under its key can be neither read
                nor replaced.
        """
        if key in self._unreadable:
            return self._replace(key, page)
        what, write = "does not keep some pages", lambda: self._store.write(key, page)
        try:
            return self._tried(write, what, MissReason.OTHER, expected=(CapacityError, PermissionError))
        except (CapacityError, BlockingStore.PageError):
            raise
        except PermissionError as e:
            self._report(what, e)
            raise
        except Exception as e:
            if not _is_full(e):
                raise
            self._report("has no room for some pages", e)
            return False

    def write_pages(
        self, keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]]
    ) -> Sequence[bool] | None:
        """:meth:`BlockingStore.write_pages`; ``None`` if :meth:`write` must be called for each page."""
        if any(key in self._unreadable for key in keys):
            return None
        began = time.monotonic()
        try:
            return self._store.write_pages(keys, pages)
        except (CapacityError, PermissionError, BlockingStore.PageError):
            return None
        except Exception as e:
            if not _is_full(e):
                self._raise_if_gone(e, began)
            return None

    def _replace(self, key: bytes, page: Sequence[memoryview]) -> bool:
        length = sum(map(len, page))
        try:
            self._store.remove((key,))
            if not self._store.write(key, page):
                return False
            found = self._store.read(key, (memoryview(bytearray(length)),))
            if found != length:
                raise BlockingStore.PageError(
                    MissReason.UNREADABLE, f"{length} bytes were written, but {found} were read"
                )
        except CapacityError:
            raise
        except Exception as e:
            if not isinstance(e, (BlockingStore.PageError, UnsupportedError)):
                self._raise_if_gone(e)
            self._report("has pages that can be neither read nor replaced", e)
            raise BlockingStore.PageError(MissReason.UNREADABLE, in_words(e)) from e
        self.forget(key)
        return True

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove these pages. Returns which of them are gone."""
        if self._done("cannot remove some pages", lambda: self._store.remove(keys)):
            for key in keys:
                self.forget(key)
            return [True] * len(keys)
        return [False] if len(keys) == 1 else [self.remove((key,))[0] for key in keys]

    def clear(self) -> bool:
        """Remove all pages. Returns whether that succeeded."""
        if not self._done("cannot forget its pages", self._store.clear):
            return False
        with self._lock:
            self._unreadable.clear()
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """:meth:`BlockingStore.touch`."""
        self._done("cannot note the use of some pages", lambda: self._store.touch(keys))

    def _done(self, what: str, call: Callable[[], None]) -> bool:
        """Make the call. Returns whether it succeeded; logs errors, except ``UnsupportedError``."""
        try:
            call()
        except UnsupportedError:
            return False
        except Exception as e:
            if not isinstance(e, (BlockingStore.PageError, PermissionError)):
                self._raise_if_gone(e)
            self._report(what, e)
            return False
        return True

    # -- errors --------------------------------------------------------------------------------

    def _raise_if_gone(self, error: Exception, began: float | None = None) -> None:
        """Re-raise the error of a call if it means that the store is gone, or that a resource ran out.

        Args:
            began: when the call began.
        """
        is_known = isinstance(error, (ConnectionError, ClosedError, MemoryError))
        was_slow = began is not None and time.monotonic() - began > _SLOW_S
        if is_known or was_slow or NamedExhaustion.of(error) is not None:
            raise error
        try:
            self._store.has((os.urandom(32),))
        except Exception:
            raise error from None

    def _report(self, what: str, error: BaseException) -> None:
        """Log an error: the first one with its cause as a warning, later ones for debugging."""
        root = error.__cause__ or error if isinstance(error, BlockingStore.PageError) else error
        cause = what, getattr(error, "reason", None), type(root), getattr(root, "errno", None)
        with self._lock:
            is_new = cause not in self._reported
            self._reported.add(cause)
        level = None if is_new and not ExitGuard.is_leaving() else logging.DEBUG
        why = in_words(error)
        text = f"the store {self._name!r} {what}. The first one: {why}"
        LogEvent.STORE_ERROR.log(_log, text, level=level, store=self._name, error=f"{what}: {why}")


def _is_full(error: Exception) -> bool:
    found = NamedExhaustion.of(error)
    return found is not None and found.resource == SPACE
