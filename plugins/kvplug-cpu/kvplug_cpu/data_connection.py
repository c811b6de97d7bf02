"""One data connection of a pipe: a blocking stream socket, with non-blocking calls where needed.

    connection 0:  header (16 bytes) | meta | tensor bytes, or the first part of them
    connection k:                             the k-th part of a split tensor

The header's length counts everything after it, on all connections. A tensor is split over all of them when
the header's flag says so; both ends compute the parts from its size and the number of connections. GOODBYE is
the last thing on connection 0 of a pipe that was closed politely.

Whole buffers are handed to the kernel in blocking calls, one thread per connection and direction. Measured
against non-blocking sockets with ``poll`` this is a third to a half faster: the kernel lets sender and
receiver alternate on one core while the bytes are still in its cache. Python drops the interpreter lock
during each call.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import sys
from collections.abc import Sequence

from kvplug.transport import Deadline

SPLIT = 1
"""Flag: the tensor's bytes are spread over all data connections."""
_PAGE = 4096
_NOT_NOW = socket.MSG_DONTWAIT
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_SIOCOUTQ = 0x5411
_LONGEST_POLL_S = 1e6
_FOREVER = struct.pack("@ll", 0, 0)
_LOOPBACK_TCP_BUFFER_BYTES = 64 * 1024
"""On loopback a small buffer stays in the cache: 7.4 GB/s against 4.0 with the kernel's tuning."""


class DataConnection:
    """A connected stream socket, which this object owns."""

    def __init__(self, sock: socket.socket, *, buffer_bytes: int = 0) -> None:
        self._sock = sock
        sock.settimeout(None)
        self.tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        try:
            self._tune(buffer_bytes)
        except OSError:
            pass  # the peer is gone already; the first use reports it
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._receive_limited = False
        self.ended = False
        """The stream has been read to its end: nothing more will come."""

    def _tune(self, buffer_bytes: int) -> None:
        sock = self._sock
        if self.tcp:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not buffer_bytes and sock.getpeername()[0] in ("127.0.0.1", "::1"):
                buffer_bytes = _LOOPBACK_TCP_BUFFER_BYTES
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)

    def send_now(self, views: Sequence[memoryview]) -> int:
        """Send as much as the kernel accepts without waiting; returns the bytes sent, maybe 0.

        Raises:
            OSError: the connection is broken.
        """
        try:
            return self._sock.sendmsg(views, (), _NOT_NOW | _NO_SIGNAL)
        except BlockingIOError:
            return 0

    def send(self, views: Sequence[memoryview]) -> int:
        """Send bytes, waiting for room; may send only a part. Raises OSError like ``send_now``."""
        return self._sock.sendmsg(views, (), _NO_SIGNAL)

    def receive_now(self, view: memoryview) -> int:
        """Read what has arrived, without waiting; 0 if nothing has, or if the stream has ended."""
        try:
            n = self._sock.recv_into(view, 0, _NOT_NOW)
        except BlockingIOError:
            return 0
        except OSError:
            n = 0
        self.ended = n == 0
        return n

    def receive(self, view: memoryview, deadline: Deadline) -> int:
        """Fill ``view``; returns fewer bytes only at the deadline or at the end of the stream."""
        got, size = 0, len(view)
        while got < size:
            left = deadline.remaining()
            if left == 0.0:
                n = self.receive_now(view[got:])
            else:
                # A signal ends the call if a byte has arrived; if none has, Python would restart it with its
                # whole time limit.
                if left is not None and not self.wait_readable(deadline):
                    continue
                self._limit_receive(left)
                try:
                    n = self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    continue
                except OSError:
                    n = 0
                self.ended = n == 0
            if n == 0:
                break
            got += n
        return got

    def wait_readable(self, deadline: Deadline) -> bool:
        """Wait until ``receive_now`` would return bytes or notice the end; False at the deadline."""
        left = deadline.remaining()
        return bool(self._readable.poll(None if left is None else min(left, _LONGEST_POLL_S) * 1000))

    def undelivered(self) -> int:
        """Bytes that the peer's kernel has not acknowledged; always 0 on Unix sockets.

        A TCP socket that is closed with unread bytes in it resets the connection, and bytes that the other
        side's kernel has not received by then are lost.
        """
        if not self.tcp or not sys.platform.startswith("linux"):
            return 0
        try:
            return int(struct.unpack("i", fcntl.ioctl(self._sock, _SIOCOUTQ, b"\0" * 4))[0])
        except OSError:
            return 0

    def stop_receiving(self) -> None:
        """Wake the thread that is receiving; what the kernel already has can still be read."""
        self._shutdown(socket.SHUT_RD)

    def stop_sending(self) -> None:
        """Wake the thread that is sending; the peer sees the end of the stream after what the kernel has."""
        self._shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Wake threads that are sending or receiving; what the kernel already has can still be read."""
        self._shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. Only when no thread is inside a call."""
        self._sock.close()

    def _shutdown(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:
            pass  # the peer was faster

    def _limit_receive(self, seconds: float | None) -> None:
        # When the kernel's own receive timeout passes, it returns the bytes that have arrived, as resuming
        # needs. Zero would mean no timeout.
        if seconds is None:
            if self._receive_limited:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _FOREVER)
                self._receive_limited = False
            return
        micros = max(1, int(seconds * 1e6))
        timeval = struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._receive_limited = True


def parts(nbytes: int, count: int) -> list[tuple[int, int]]:
    """(start, stop) of each connection's part of a split tensor: whole pages, as even as possible."""
    share = -(-nbytes // (count * _PAGE)) * _PAGE
    return [(min(k * share, nbytes), min((k + 1) * share, nbytes)) for k in range(count)]
