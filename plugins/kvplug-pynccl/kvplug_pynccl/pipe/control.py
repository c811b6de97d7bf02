"""The connection between the two ends of a pipe as its worker uses it: without blocking, in frames."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import Final

from kvplug.transport import Connection, close_after_fork
from kvplug_pynccl.pipe.frames import GOODBYE, Frame, FrameParser

_READ_BYTES: Final = 64 * 1024


class ControlConnection:
    """Any thread sends; the pipe's worker receives, sends what is left, waits, and closes it at the end."""

    def __init__(self, connection: Connection) -> None:
        """Owns the connection from here on, unless it raises.

        Raises:
            OSError: there is no descriptor for waking the worker.
        """
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.peer = connection.describe
        self.sock = connection.sock
        self.sock.setblocking(False)
        self._connection = connection
        self._parser = FrameParser()
        self.lock = threading.RLock()  # also for the handler of a signal, which may abort the pipe
        self._unsent = bytearray()
        self._closed = False
        self._last = b""
        """The end of what was received."""
        self.ended = False
        """The peer sends nothing more."""
        close_after_fork(self)

    def send(self, data: bytes) -> None:
        """Send at once what the kernel takes; the worker sends the rest, which the window bounds."""
        with self.lock:
            if self._closed:
                return
            self._unsent += data
            self._send()
            left = bool(self._unsent)
        if left:
            self.wake()

    def wake(self) -> None:
        """End the worker's :meth:`wait`."""
        with self.lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._wake, 1)

    def hang_up(self) -> None:
        """The peer sees the end of the connection, whichever threads use it here."""
        with self.lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)

    # -- the worker --------------------------------------------------------------------------------------

    def wait(self, seconds: float | None) -> None:
        """Wait until there is something to read or room to write, :meth:`wake` is called, or time is up."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if not self.ended:
            poller.register(self.sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poller.poll(None if seconds is None else seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def send_now(self) -> None:
        """Send what the kernel did not take before and takes now."""
        with self.lock:
            self._send()

    def _send(self) -> None:
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # receiving notices that the peer is gone
                return
            del self._unsent[:sent]

    def receive_now(self) -> list[Frame]:
        """The frames that are complete now. Raises WireError: what came is not a frame."""
        if self.ended:
            return []
        try:
            with self.lock:
                data = self.sock.recv(_READ_BYTES)
                self._last = (self._last + data)[-len(GOODBYE) :]
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
        return self._parser.feed(data)

    def peer_said_goodbye(self) -> bool:
        """Whether the last that the peer sent says so, also if the worker has not read it yet. Any thread."""
        with self.lock:
            last = self._last
            if not self._closed:
                with contextlib.suppress(OSError):
                    last += self.sock.recv(_READ_BYTES, socket.MSG_PEEK)
        return last.endswith(GOODBYE)

    def has_hung_up(self, within_s: float) -> bool:
        """Whether the peer has ended the connection, or does so within this time."""
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return self.ended or bool(poller.poll(within_s * 1000))

    def close(self) -> None:
        """Close the descriptors. Only the worker calls it, which is the only thread that blocks on them."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self._connection.close()
                os.close(self._wake)

    def _after_fork_in_child(self) -> None:
        self.close()
