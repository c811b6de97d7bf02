"""A plain socket for each TLS connection, so that everything above reads, writes and polls it as any other.

One thread carries the bytes between the TLS connection and one end of a socket pair; the other end is the
plain socket. The end of either becomes the end of the other, after everything that was sent before.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import sys
import time

from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread

_BUFFER_BYTES = 256 * 1024
_LINGER_S = 10.0
"""After the plain socket was closed: how long the peer may take nothing of what was sent before."""
_LINGER_POLL_S = 0.01
_SIOCOUTQ = 0x5411
_TCP_CLOSE = 7  # of <linux/tcp_states.h>
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def plain_end(tls: ssl.SSLSocket) -> socket.socket:
    """The plain socket of a TLS connection, which it owns from here on, also if it raises.

    Raises:
        OSError: no descriptor is left.
        RuntimeError: no thread can be started.
    """
    try:
        given, near = socket.socketpair()
    except BaseException:
        tls.close()
        raise
    relay = _Relay(tls, near)
    try:
        BackgroundThread(relay.run, name="kvplug-tls", stop=relay.finish).start()
    except BaseException:
        relay.close()
        given.close()
        raise
    return given


class _Direction:
    """Bytes on their way from one socket to the other one. Neither blocks."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source = source
        self._sink = sink
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._unsent = self._buffer[:0]
        self._ended = False
        self.over = False
        """Nothing more is carried."""
        self.waits_for: tuple[socket.socket, int] = (source, select.POLLIN)
        """The socket and the event without which nothing can be carried now."""

    def move(self) -> bool:
        """Carry all that can be carried without waiting. Returns whether that was anything."""
        moved = False
        while not self.over:
            if self._unsent:
                moved = self._send() or moved
                if self._unsent:
                    break
            elif self._ended:
                with contextlib.suppress(OSError):  # without TLS's own farewell: frames have lengths
                    socket.socket.shutdown(self._sink, socket.SHUT_WR)
                self.over = True
            elif not self._receive():
                break
        return moved

    def stop(self) -> None:
        """The sink takes nothing more."""
        self.over, self._unsent = True, self._buffer[:0]
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._source, socket.SHUT_RD)

    def _receive(self) -> bool:
        try:
            received = self._source.recv_into(self._buffer)
        except _BLOCKED as e:
            self._blocked(e, self._source, select.POLLIN)
            return False
        except OSError:
            received = 0
        self._ended = not received
        self._unsent = self._buffer[:received]
        return True

    def _send(self) -> bool:
        try:
            sent = self._sink.send(self._unsent)
        except _BLOCKED as e:
            self._blocked(e, self._sink, select.POLLOUT)
            return False
        except OSError:
            self.stop()
            return False
        self._unsent = self._unsent[sent:]
        return True

    def _blocked(self, error: Exception, sock: socket.socket, event: int) -> None:
        if isinstance(error, ssl.SSLWantReadError):
            event = select.POLLIN
        elif isinstance(error, ssl.SSLWantWriteError):
            event = select.POLLOUT
        self.waits_for = sock, event


class _Relay:
    def __init__(self, tls: ssl.SSLSocket, near: socket.socket) -> None:
        self._tls = tls
        self._near = near
        for sock in (tls, near):
            sock.setblocking(False)
        close_after_fork(self)

    def close(self) -> None:
        self._near.close()
        self._tls.close()

    def finish(self) -> None:
        """The program leaves: deliver what it has sent, as if it had closed the plain socket."""
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)

    def _after_fork_in_child(self) -> None:
        self.close()

    def run(self) -> None:
        out, into = _Direction(self._near, self._tls), _Direction(self._tls, self._near)
        closed_at: float | None = None  # of the plain socket; later: of the last progress after that
        try:
            while True:
                if (out.move() | into.move()) and closed_at is not None:
                    closed_at = time.monotonic()
                if out.over and into.over:
                    break
                pause = None
                if closed_at is not None:
                    pause = max(0.0, closed_at + _LINGER_S - time.monotonic()) * 1000
                    if not pause:
                        return
                if self._wait(out, into, pause, closed=closed_at is not None):
                    closed_at = time.monotonic()
                    into.stop()
            self._linger()
        finally:
            self.close()

    def _wait(self, out: _Direction, into: _Direction, pause: float | None, *, closed: bool) -> bool:
        """Until one of the two can go on. Returns whether the plain socket was closed meanwhile."""
        masks = {self._tls.fileno(): 0, self._near.fileno(): 0}
        for each in (out, into):
            if not each.over:
                sock, event = each.waits_for
                masks[sock.fileno()] |= event
        poller = select.poll()
        for fd, mask in masks.items():
            # The plain socket is also polled for its end, which it has in any case.
            if mask or (fd == self._near.fileno() and not closed):
                poller.register(fd, mask)
        ready = dict(poller.poll(pause))
        return not closed and bool(ready.get(self._near.fileno(), 0) & select.POLLHUP)

    def _linger(self) -> None:
        """Until the peer's kernel has everything: closing a TCP socket that holds unread bytes resets the
        connection, and what was not delivered by then is lost.
        """
        limit = time.monotonic() + _LINGER_S
        while time.monotonic() < limit and _undelivered(self._tls):
            time.sleep(_LINGER_POLL_S)


def _undelivered(sock: socket.socket) -> int:
    if not sys.platform.startswith("linux"):
        return 0
    try:
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            return 0  # reset by the peer: what was not delivered never is
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0
