"""What both ends of a queue share: one thread at a time is inside, and the last one to leave ends it."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvplug import ClosedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BusyError,
    Deadline,
    ExitGuard,
    MessageQueue,
    QueueEndpoint,
    Timeout,
)

_AGAIN_S: Final = 0.005


class UseGuard:
    """``with guard:`` around each call that waits, sends or receives.

    Raises:
        ClosedError: the end is closed.
        BusyError: another thread is inside.
    """

    def __init__(self, drop: Callable[[], None]) -> None:
        """``drop`` is called once, when the end is over and no thread is inside any more."""
        self.closed = False
        self.ended = False
        """Everything was released, except the memory that a thread inside still uses."""
        self._drop = drop
        self._lock = threading.Lock()
        """Held by the thread that is inside; after the end it is held for ever."""
        self._inside = 0
        self._shutting = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a thread other than the main one is inside."""
        return self._inside not in (0, threading.main_thread().ident)

    def __enter__(self) -> None:
        if self.closed:
            self.check()
        if not self._lock.acquire(blocking=False):
            self.check()
            raise BusyError("another thread is already at this end of the queue; one at a time")
        if self.closed:
            self._leave()
            self.check()
        self._inside = threading.get_ident()

    def __exit__(self, kind: object, *_: object) -> None:
        self._inside = 0
        self._leave()
        if kind is not None:
            ExitGuard.hold()

    def check(self) -> None:
        """Raises ClosedError if the end is closed."""
        if self.closed:
            raise ClosedError("this end of the queue is closed")

    def close(self) -> bool:
        """Let no thread enter any more; :meth:`check` raises in one that is inside. True for the first
        caller.
        """
        if self.closed or not self._shutting.acquire(blocking=False):
            return False
        self.closed = True
        return True

    @contextmanager
    def alone(self, deadline: Deadline, wake: Callable[[], None]) -> Iterator[bool]:
        """After :meth:`close`: wait until no other thread is inside. False at the deadline, or at the end.

        The caller itself may be inside, with a chunk. ``wake`` wakes sleeping threads; it is called
        repeatedly, because a thread may have been about to sleep.
        """
        if self._inside == threading.get_ident():
            yield True
            return
        while not self._lock.acquire(timeout=_AGAIN_S):
            if self.ended or deadline.expired:
                yield False
                return
            wake()
        try:
            yield not self.ended
        finally:
            self._leave()

    def release(self) -> None:
        """After :meth:`close`, when all else is done. Idempotent."""
        self.ended = True
        self._settle()

    def _leave(self) -> None:
        self._lock.release()
        if self.ended:
            self._settle()

    def _settle(self) -> None:
        if self._lock.acquire(blocking=False):
            self._drop()

    def after_fork(self) -> None:
        """This is a forked child: the end and its resources are the parent's. Takes no lock."""
        self.closed = self.ended = True
        self._drop = lambda: None


class ShmEnd(MessageQueue):
    """One end of a queue "shm"."""

    def __init__(
        self,
        context: QueueEndpoint.Context,
        handle: QueueEndpoint.Handle,
        rank: int | None,
        drop: Callable[[], None],
    ) -> None:
        self._handle = handle
        self._use_guard = UseGuard(drop)
        super().__init__(context, rank)

    @property
    def closed(self) -> bool:
        return self._use_guard.closed

    def export_handle(self) -> QueueEndpoint.Handle:
        self._use_guard.check()
        return self._handle

    def _is_in_use(self) -> bool:
        return self._use_guard.busy

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        if not self._use_guard.close():
            return
        try:
            self._wake()
            with self._use_guard.alone(deadline, self._wake) as alone:
                if alone:
                    self._announce_end(deadline)
        finally:
            self._finish()

    def abort(self) -> None:
        # Also ends a close() that still waits in another thread, or was interrupted.
        self._use_guard.close()
        if not self._use_guard.ended:
            self._wake()
            self._finish()

    def _finish(self) -> None:
        self._end()
        self._use_guard.release()

    @abc.abstractmethod
    def _wake(self) -> None:
        """Wake threads that are inside a call: they find that this end is closed."""

    @abc.abstractmethod
    def _announce_end(self, deadline: Deadline) -> None:
        """Announce that this end leaves; no other thread is inside. Waits until the deadline at most.

        :meth:`_end` follows. If another thread calls it meanwhile, this stops waiting.
        """

    @abc.abstractmethod
    def _end(self) -> None:
        """Disconnect from the other ends. Never blocks. Idempotent, from any thread."""

    def _after_fork_in_child(self) -> None:
        self._use_guard.after_fork()
