"""The connection to a reader that shares no memory with the writer, after its join.

    writer to reader    headers, each followed by the head and the body of a message, or by a reason
    reader to writer    reports

Both ends send something at least every fifth of the silence that counts as their death, unless both see the
other's death by a pidfd.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from kvplug import PeerGoneError
from kvplug.transport import NamedExhaustion, Watch
from kvplug_shm.joining import JoiningPeer

HEADER: Final = struct.Struct("<BB6xQQQ")
"""Kind, whether the message is a chunk, number of published messages, bytes of the head and of the body."""
REPORT: Final = struct.Struct("<B7xQQ")
"""Flags, number of messages that have arrived whole, number of messages that were read."""
LINGER_S: Final = 1.0
"""How long an end that leaves waits until the other end has noticed."""
_STEP_BYTES: Final = 1 << 20
_LAST_BYTES_S: Final = 0.2
"""Within this time the last bytes of a dead process arrive, and an exit shows that has closed connections."""


class FrameKind(enum.IntEnum):
    """What a header announces."""

    ALIVE = 0
    """Nothing: it is a heartbeat."""
    MESSAGE = 1
    READY = 2
    """The writer and all readers are ready."""
    OVER = 3
    """Nothing more is sent. The head is the reason, as text; it is empty if the writer was closed."""


class Flag(enum.IntFlag):
    """What a report announces."""

    READY = 1
    """The reader waits until all are ready."""
    LEAVES = 2


def header(
    kind: FrameKind, published: int, raw: bool = False, head_nbytes: int = 0, body_nbytes: int = 0
) -> bytes:
    return HEADER.pack(kind, raw, published, head_nbytes, body_nbytes)


class Stream:
    """Bytes in both directions. One thread receives, which also sends the heartbeats; any thread sends."""

    def __init__(self, peer: JoiningPeer, heartbeat: Callable[[], bytes]) -> None:
        """Takes ownership of the connection to the other end, and of its pidfd."""
        self._connection = peer.connection
        self._sock = peer.connection.sock
        self._pidfd = peer.take_pidfd()
        self._silence_s = silence_s = peer.silence_s
        self._interval_s = None if silence_s is None else silence_s / Watch.Terms.BEATS_PER_TIMEOUT
        self._heartbeat = heartbeat
        self._next_beat = time.monotonic()
        self._num_silent = 0
        """Intervals without a byte. Counted, since this process may have been stopped meanwhile."""
        self._is_dead = False
        self._sending = threading.RLock()
        self.num_sent_bytes = 0

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all bytes of the parts, waiting for room.

        Raises:
            PeerGoneError: the connection has ended.
            ResourceExhaustedError: the kernel has no memory for them. The connection cannot be used any more.
        """
        with self._sending:
            views = [memoryview(part) for part in parts if len(part)]
            try:
                while views:
                    sent = self._sock.sendmsg(_first_step(views), (), socket.MSG_NOSIGNAL)
                    self.num_sent_bytes += sent
                    while sent:
                        step = min(sent, len(views[0]))
                        views[0], sent = views[0][step:], sent - step
                        if not views[0]:
                            del views[0]
            except OSError as e:
                NamedExhaustion.check(e, "sending to the other end of a queue")
                raise PeerGoneError("its connection ended") from e

    def send_now(self, data: bytes) -> None:
        """Send a few bytes, unless another thread is sending or there is no room. Never waits or raises."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            room = select.poll()
            room.register(self._sock, select.POLLOUT)
            if room.poll(0):
                self.send(data)
        except (PeerGoneError, ValueError):  # ValueError: it is closed
            pass
        finally:
            self._sending.release()

    def receive(self, view: memoryview) -> None:
        """Fill ``view``.

        Raises:
            PeerGoneError: the other end is gone; says how.
            ResourceExhaustedError: the kernel has no memory.
        """
        while view:
            if self._interval_s is not None and time.monotonic() >= self._next_beat:
                self._next_beat = time.monotonic() + self._interval_s
                self.send_now(self._heartbeat())
            try:
                received = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait()
                continue
            except OSError as e:
                NamedExhaustion.check(e, "receiving from the other end of a queue")
                received = 0
            if not received:
                raise PeerGoneError("its process ended" if self._has_died() else "its connection ended")
            self._num_silent = 0
            view = view[received:]

    def _wait(self) -> None:
        """Wait until there is something to receive, a heartbeat is due, or the other process has ended.

        Raises:
            PeerGoneError: it is silent for too long, or has ended and everything of it was received.
        """
        events = select.poll()
        events.register(self._sock, select.POLLIN)
        pause_s = self._interval_s
        if self._is_dead:
            pause_s = _LAST_BYTES_S
        elif self._pidfd is not None:
            events.register(self._pidfd, select.POLLIN)
        ready = dict(events.poll(None if pause_s is None else pause_s * 1000))
        if self._sock.fileno() in ready:
            return
        if self._is_dead:
            raise PeerGoneError("its process ended")
        if ready:
            self._is_dead = True
            return
        self._num_silent += 1
        if self._num_silent >= Watch.Terms.BEATS_PER_TIMEOUT:
            raise PeerGoneError(f"silent for {self._silence_s:.1f} s")

    def _has_died(self) -> bool:
        """Whether the other process has ended: the kernel closes its connections a moment before."""
        if self._is_dead or self._pidfd is None:
            return self._is_dead
        events = select.poll()
        events.register(self._pidfd, select.POLLIN)
        return bool(events.poll(_LAST_BYTES_S * 1000))

    def hang_up(self) -> None:
        """End the connection: threads that send or receive notice it. Never waits."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptors. For the receiving thread, as its last call."""
        self.hang_up()
        with self._sending:
            self._connection.close()
        self.close_pidfd()

    def close_pidfd(self) -> None:
        """Close the other end's pidfd alone."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)


def _first_step(views: list[memoryview]) -> list[memoryview]:
    """The bytes of one system call: few enough to see whether the other end takes them."""
    step: list[memoryview] = []
    for view in views:
        step.append(view[:_STEP_BYTES])
        if len(view) > _STEP_BYTES:
            break
    return step
