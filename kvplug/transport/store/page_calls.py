"""The calls of a blocking store, with their errors told apart: of one page, or of the whole store.

A store may raise whatever its libraries raise. A ``ConnectionError`` means that it is gone. After any other
error it is asked, once, for a key that no page has: if that raises as well, the store is gone; else the call
is made once more, and its next error is of its page.

A page that could not be read is remembered: lookups call it absent until a put has replaced it. In case that
another process replaces it, it is read again now and then."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from kvplug.errors import CapacityError, ClosedError, UnsupportedError
from kvplug.net.exhaustion import SPACE, NamedExhaustion
from kvplug.net.threads import ExitGuard
from kvplug.transport.store.blocking import BlockingStore, PageError
from kvplug.transport.store.engine import in_words
from kvplug.transport.store.results import MissReason

_log = logging.getLogger(__name__)

_MAX_UNREADABLE: Final = 1 << 14
"""Pages that are remembered. The oldest are forgotten, and fail once more."""
_SLOW_S: Final = 5.0
"""A call that took longer before it failed may have waited for a lock, and the next one would, too."""
_RETRY_S: Final = 30.0
"""Before an unreadable page is read again."""
_PASSING: Final = frozenset(
    {MissReason.TIMEOUT, MissReason.CANCELLED, MissReason.CLOSED, MissReason.NO_MEMORY}
)
"""Reasons that say nothing about the page."""


@attrs.define
class _Unreadable:
    nbytes: int
    retry_at: float


class PageCalls:
    """The calls of one blocking store. Threads may share it. Any error other than those that a method names
    means that the store is gone, or that the process has run out of a resource."""

    def __init__(self, store: BlockingStore, name: str) -> None:
        """``name``: of the store, for messages."""
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._unreadable: OrderedDict[bytes, _Unreadable] = OrderedDict()
        self._reported: set[tuple[object, ...]] = set()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether there is a page under each key that can be read, as far as is known.

        Raises:
            PageError: the call was given up.
        """
        return self.readable(keys, self._held(keys, is_first=True))

    def readable(self, keys: Sequence[bytes], held: list[bool]) -> list[bool]:
        """Of pages that are said to be held or not: which are, and can be read, as far as is known."""
        if self._unreadable:
            for index, key in enumerate(keys):
                if held[index] and (unreadable := self._unreadable.get(key)) is not None:
                    held[index] = self._can_be_read_now(key, unreadable)
                elif not held[index]:
                    self.forget(key)  # it is not there any more
        return held

    def _held(self, keys: Sequence[bytes], *, is_first: bool = False) -> list[bool]:
        """If the call fails, the keys are asked for in halves: all but the bad ones have their answers."""
        try:
            found = [bool(each) for each in self._store.has(keys)][: len(keys)]
            return found + [False] * (len(keys) - len(found))
        except ConnectionError:
            raise
        except PageError as e:
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
        """Read a page again that could not be read, unless that was tried a moment ago."""
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
        """As that of the store.

        Raises:
            PageError: the page cannot be read.
        """
        nbytes, error, began = sum(map(len, into)), None, time.monotonic()
        while True:
            try:
                length = self._store.read(key, into)
                if length is None and self._store.has((key,))[0]:
                    length = self._store.read(key, into)  # it may have come in between
                    if length is None:
                        raise PageError(MissReason.UNREADABLE, "the store has it, and does not give it")
                return length
            except PageError as e:
                if e.reason not in _PASSING:
                    self.is_unreadable(key, nbytes)
                    self._report("has pages that cannot be read; they are misses", e)
                raise
            except Exception as e:
                self._raise_if_gone(e, began)
                if isinstance(e, TimeoutError):
                    raise PageError(MissReason.TIMEOUT, in_words(e)) from e
                if error is not None:  # the first time its connection may have been lost, and is there again
                    self.is_unreadable(key, nbytes)
                    self._report("has pages that cannot be read; they are misses", e)
                    raise PageError(MissReason.UNREADABLE, in_words(e)) from e
                error = e

    def is_unreadable(self, key: bytes, nbytes: int) -> None:
        """Note that what is under the key cannot be used. ``nbytes``: the length of the page."""
        with self._lock:
            self._unreadable[key] = _Unreadable(nbytes, time.monotonic() + _RETRY_S)
            if len(self._unreadable) > _MAX_UNREADABLE:
                self._unreadable.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Note that the page is not there, or can be read."""
        if self._unreadable:
            with self._lock:
                self._unreadable.pop(key, None)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        """As that of the store. What cannot be read under the key is replaced.

        Raises:
            CapacityError, PermissionError: as that of the store.
            PageError: the page cannot be written, or what is under its key can be neither read nor replaced.
        """
        if key in self._unreadable:
            return self._replace(key, page)
        error, began = None, time.monotonic()
        while True:
            try:
                return self._store.write(key, page)
            except CapacityError:
                raise
            except (PageError, PermissionError) as e:
                if getattr(e, "reason", None) not in _PASSING:
                    self._report("does not keep some pages", e)
                raise
            except Exception as e:
                found = NamedExhaustion.of(e)
                if found is not None and found.resource == SPACE:
                    self._report("has no room for some pages", e)
                    return False
                self._raise_if_gone(e, began)
                if isinstance(e, TimeoutError) or error is not None:
                    self._report("does not keep some pages", e)
                    reason = MissReason.TIMEOUT if isinstance(e, TimeoutError) else MissReason.OTHER
                    raise PageError(reason, in_words(e)) from e
                error = e

    def _replace(self, key: bytes, page: Sequence[memoryview]) -> bool:
        length = sum(map(len, page))
        try:
            self._store.remove((key,))
            if not self._store.write(key, page):
                return False
            found = self._store.read(key, (memoryview(bytearray(length)),))
            if found != length:
                raise PageError(MissReason.UNREADABLE, f"it has {found} bytes after {length} were written")
        except CapacityError:
            raise
        except Exception as e:
            if not isinstance(e, (PageError, UnsupportedError)):
                self._raise_if_gone(e)
            self._report("has pages that can be neither read nor replaced", e)
            raise PageError(MissReason.UNREADABLE, in_words(e)) from e
        self.forget(key)
        return True

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget these pages. Returns which are not there any more."""
        try:
            self._store.remove(keys)
        except UnsupportedError:
            return [False] * len(keys)
        except Exception as e:
            if not isinstance(e, (PageError, PermissionError)):
                self._raise_if_gone(e)
            if len(keys) > 1:
                return [self.remove((key,))[0] for key in keys]
            self._report("cannot remove some pages", e)
            return [False] * len(keys)
        for key in keys:
            self.forget(key)
        return [True] * len(keys)

    def clear(self) -> bool:
        """Forget all pages. Returns whether it is done."""
        if not self._done("cannot forget its pages", self._store.clear):
            return False
        with self._lock:
            self._unreadable.clear()
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """As that of the store."""
        self._done("cannot note the use of some pages", lambda: self._store.touch(keys))

    def _done(self, what: str, call: Callable[[], None]) -> bool:
        """Whether the call has succeeded."""
        try:
            call()
        except UnsupportedError:
            return False
        except Exception as e:
            if not isinstance(e, (PageError, PermissionError)):
                self._raise_if_gone(e)
            self._report(what, e)
            return False
        return True

    # -- errors --------------------------------------------------------------------------------

    def _raise_if_gone(self, error: Exception, began: float | None = None) -> None:
        """Raise the error of a call again if it means that the store is gone, or that a resource ran out.

        Args:
            began: when the call was made.
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
        """One line for each cause."""
        root = error.__cause__ or error if isinstance(error, PageError) else error
        cause = what, getattr(error, "reason", None), type(root), getattr(root, "errno", None)
        with self._lock:
            is_new = cause not in self._reported
            self._reported.add(cause)
        level = logging.WARNING if is_new and not ExitGuard.is_leaving() else logging.DEBUG
        _log.log(level, "the store %r %s. The first one: %s", self._name, what, in_words(error))
