"""Sends over a channel without waiting: at once if that is possible, else from a thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

from kvplug.errors import ClosedError, KvplugError, PeerGoneError, TimeoutError, WireError
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.channel import Channel

_SMALL: Final = 256
"""Bytes counted for each dict besides its content."""
_FLUSH: Final = object()


class Outbox:
    """Sends messages in order to one peer, which may not read for a while.

    Callers. Any threads. No call waits for the peer. The owner of the channel closes it after :meth:`end`;
    this wakes the thread.

    Not promised. That the peer has received a message.
    """

    def __init__(self, channel: Channel, name: str, *, max_waiting_bytes: int = 256 << 20) -> None:
        """
        Args:
            name: names the thread.
            max_waiting_bytes: how many bytes may wait for a peer that does not read.
        """
        self._channel = channel
        self._name = name
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Any] = deque()
        self._thread: threading.Thread | None = None
        self._is_sending = False
        self._over = False
        self._waiting_bytes = 0
        self._most_bytes = max_waiting_bytes
        self.is_full = False
        """Whether a message was refused because the peer does not read."""

    def limit(self, nbytes: int) -> None:
        """Let at most ``nbytes`` more bytes wait, besides those that wait now."""
        with self._lock:
            self._most_bytes = self._waiting_bytes + nbytes

    def send(self, message: Any) -> bool:
        """Send a message now or later. Returns ``False`` if it is dropped, since the peer is gone or does not
        read.

        Raises:
            UnsupportedError, CapacityError: the message cannot be sent.
        """
        with self._lock:
            if self._over:
                return False
            if not self._waiting and not self._is_sending:
                try:
                    self._channel.send(message, timeout=0)
                    return True
                except TimeoutError:
                    message = _FLUSH if self._channel.unsent else message
                except (PeerGoneError, ClosedError, WireError):
                    self._over = True
                    return False
            cost = _cost(message)
            if self._waiting_bytes + cost > self._most_bytes:
                self.is_full = True
                return False
            self._waiting_bytes += cost
            self._waiting.append(message)
            return self._wake()

    def _wake(self) -> bool:
        if self._thread is None:
            thread = BackgroundThread(self._run, name=self._name, stop=self._stop)
            try:
                thread.start()
            except RuntimeError:
                self._over = True
                return False
            self._thread = thread
        self._changed.notify()
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._waiting:
                    if self._over:
                        return
                    self._changed.wait()
                message = self._waiting.popleft()
                self._waiting_bytes -= _cost(message)
                self._is_sending = True
            try:
                if message is _FLUSH:
                    self._channel.flush(timeout=None)
                else:
                    self._channel.send(message, timeout=None)
            except KvplugError:
                self._stop()  # the owner of the channel, who may be receiving, notices it
                return
            finally:
                with self._lock:
                    self._is_sending = False

    def _stop(self) -> None:
        self.end()
        self._channel.close()

    def end(self) -> None:
        """Drop the waiting messages, and send no more."""
        with self._lock:
            self._over = True
            self._waiting.clear()
            self._changed.notify_all()


def _cost(message: Any) -> int:
    if isinstance(message, dict):
        return _SMALL + sum(map(_cost, message.values()))
    if isinstance(message, list):
        return sum(map(_cost, message))
    return len(message) if isinstance(message, bytes) else 0
