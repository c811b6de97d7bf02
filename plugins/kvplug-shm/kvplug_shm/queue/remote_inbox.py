"""Received and unread messages of a remote reader, filled by the thread of its connection."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kvplug import KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import Deadline, MessageQueue
from kvplug_shm.queue.network import QueueMessage


class Inbox:
    """Whole messages, and the reason of the end. One thread fills it, another empties it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._messages: deque[tuple[QueueMessage, mmap.mmap | None]] = deque()
        self._error: tuple[Callable[[str], KvplugError], str] | None = None
        self._joined = self._ready = False
        self.read = 0
        """Messages that were read."""
        self._put_bytes = self._taken_bytes = 0  # each changed by one of the two threads

    # -- for the connection's thread -----------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether :meth:`fail` was called: nothing more is added."""
        return self._error is not None

    @property
    def joined(self) -> bool:
        return self._joined

    @property
    def nbytes(self) -> int:
        """Bytes of all unread messages."""
        return self._put_bytes - self._taken_bytes

    def put(self, message: QueueMessage, memory: mmap.mmap | None) -> None:
        """Add a message; :meth:`take` returns its ``memory``."""
        with self._lock:
            self._messages.append((message, memory))
            self._put_bytes += _nbytes(message)
            self._changed.notify_all()

    def join(self) -> None:
        """The writer has admitted this reader."""
        with self._lock:
            self._joined = True
            self._changed.notify_all()

    def make_ready(self) -> None:
        """The writer says that all are ready."""
        with self._lock:
            self._ready = True
            self._changed.notify_all()

    def fail(self, kind: Callable[[str], KvplugError], text: str) -> None:
        """Nothing more arrives. The first reason is kept; ``kind`` makes an error of its text."""
        with self._lock:
            self._error = self._error or (kind, text)
            self._changed.notify_all()

    # -- for the reader's thread ---------------------------------------------------------------

    def first(self) -> QueueMessage | None:
        """The next message if it has arrived. Raises the reason of the end, except the writer's end."""
        if self._messages:
            return self._messages[0][0]
        if self._error is not None and self._error[0] is not PeerGoneError:
            raise self._end_error()
        return None

    def wait_for_first(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> QueueMessage:
        """Raises the reason of the end after the last message was read; and as ``wait`` and ``check`` do."""
        self._until(lambda: bool(self._messages), wait, check)
        return self._messages[0][0]

    def wait_until_ready(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> None:
        """Raises as :meth:`wait_for_first`."""
        self._until(lambda: self._ready, wait, check)

    def wait_until_joined(self, deadline: Deadline, late: str) -> None:
        """Raises the reason of the end, or a TimeoutError with the text ``late``."""
        with self._lock:
            while not self._joined:
                if self._error is not None:
                    raise self._end_error()
                if deadline.expired:
                    raise TimeoutError(late)
                self._changed.wait(deadline.remaining())

    def take(self) -> mmap.mmap | None:
        """Remove the first message. Returns its memory."""
        message, memory = self._messages.popleft()
        self.read += 1
        self._taken_bytes += _nbytes(message)
        return memory

    def wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _until(self, there: Callable[[], Any], wait: MessageQueue.Wait, check: Callable[[], None]) -> None:
        check()  # before the lock: a closed end must not wait for it
        with self._lock:
            while not there():
                if self._error is not None:
                    raise self._end_error()
                self._changed.wait(wait.pause())
                check()

    def _end_error(self) -> KvplugError:
        assert self._error is not None
        kind, text = self._error
        return kind(text)


def _nbytes(message: QueueMessage) -> int:
    return len(message.head) + message.body.nbytes
