"""The base of the two ends of the queue: one thread at a time, deadlines, and how an end closes."""

from __future__ import annotations

import abc
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvplug import ClosedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Connection,
    Deadline,
    DescriptorGuard,
    MessageQueue,
    QueueEndpoint,
    Timeout,
    Watch,
)


def watch_process(connection: Connection, hang_up: Callable[[], None]) -> Watch | None:
    """Call ``hang_up`` once the peer's process has ended, even if a child of it holds the connection open.

    Return ``None`` if the process cannot be watched; see ``PeerIdentity.open_pidfd``. Then only the end of
    the connection shows that the peer is gone.

    Raises:
        PeerGoneError: the process has ended already.
        ResourceExhaustedError: there is no free descriptor or thread.
    """
    pidfd = connection.peer.open_pidfd()
    return None if pidfd is None else Watch(pidfd=pidfd, on_gone=lambda _: hang_up())


class End(MessageQueue):
    """One end of the queue. Its descriptors are closed when no thread uses them any more."""

    def __init__(self, context: QueueEndpoint.Context, rank: int | None) -> None:
        self._closed = False
        self._lock = threading.RLock()
        self._descriptors = DescriptorGuard(self._close_descriptors, self._is_closed)
        super().__init__(context, rank)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        Deadline.after(timeout)  # checks the timeout; there is nothing to wait for
        self._end(polite=True)

    def abort(self) -> None:
        self._end(polite=False)

    def _end(self, *, polite: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._hang_up(polite)
        self._descriptors.retire()

    @abc.abstractmethod
    def _hang_up(self, polite: bool) -> None:
        """Wake the call that is under way, and shut the connections down. Called once, with the lock held."""

    @abc.abstractmethod
    def _close_descriptors(self) -> None:
        """Close the descriptors. No thread uses them any more, or this is a forked child. Idempotent."""

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A context for every call: only one thread enters, and only while the end is open."""
        with self._taken():
            self._check_open()
            with self._descriptors:
                yield

    @staticmethod
    def _poll(descriptors: list[int], seconds: float | None) -> None:
        """Sleep until one of the descriptors can be read or has ended, or the seconds have passed."""
        poll = select.poll()
        for fd in descriptors:
            poll.register(fd, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000 + 1)  # 1 ms more: never too early

    def _check_open(self) -> None:
        if self._closed:
            raise self._is_closed()

    @staticmethod
    def _is_closed() -> ClosedError:
        return ClosedError("this end of the queue is closed")

    def _after_fork_in_child(self) -> None:
        self._closed = True
