"""The connection between the two ends as the pipe's thread uses it: without waiting, in frames."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import Final

from kvplug.transport import Connection
from kvplug_pynccl.pipe.frames import Frame, Frames

_READ_BYTES: Final = 64 * 1024


class Control:
    """Any thread says something; one thread reads, writes and sleeps on it, and closes it at the end."""

    def __init__(self, connection: Connection) -> None:
        """Owns the connection from here on."""
        self.sock = connection.sock
        self.sock.setblocking(False)
        self._connection = connection
        self._frames = Frames()
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        self.ended = False
        """The other end says no more."""

    def say(self, data: bytes) -> None:
        """At once, or what the kernel does not take by the thread. What is said is bounded by the window."""
        with self._lock:
            if self._closed:
                return
            self._unsent += data
            self._send()
            left = bool(self._unsent)
        if left:
            self.wake()

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._wake, 1)

    def hang_up(self) -> None:
        """The other end is told, whoever is inside."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)

    # -- the thread ------------------------------------------------------------------------------------

    def sleep(self, seconds: float | None) -> None:
        """Until there is something to read, to write, or somebody wakes us."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if not self.ended:
            poller.register(self.sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poller.poll(None if seconds is None else seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def send_now(self) -> None:
        """What the kernel takes of what it did not take before."""
        with self._lock:
            self._send()

    def _send(self) -> None:
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # reading says that it is gone
                return
            del self._unsent[:sent]

    def receive_now(self) -> list[Frame]:
        """What has come. Raises WireError: no frames."""
        if self.ended:
            return []
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
        return self._frames.feed(data)

    def has_hung_up(self, within_s: float) -> bool:
        """Whether the other end is gone, or goes in that time."""
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return self.ended or bool(poller.poll(within_s * 1000))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._connection.close()
            os.close(self._wake)

    def inherit(self) -> None:
        """In a forked child: close what is ours. Takes no lock."""
        if not self._closed:
            self._closed = True
            self._connection.close()
            os.close(self._wake)
