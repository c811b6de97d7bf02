"""Turns a TLS connection into a plain socket, which all other code can read, write, poll and wait for.

A thread carries the bytes between the TLS connection and one end of a socket pair; the user has the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import threading
import time

from kvplug.errors import TransportError
from kvplug.net.fork import close_after_fork, close_sockets, no_fork
from kvplug.net.threads import BackgroundThread

_BUFFER_BYTES = 256 * 1024
_LINGER_S = 10.0
"""After the user has closed its socket: how long the peer may go without accepting any bytes."""
_LINGER_POLL_S = 0.01
_SIOCOUTQ = 0x5411
_TCP_CLOSE = 7  # of <linux/tcp_states.h>


def plain_end(tls: ssl.SSLSocket, where: str) -> socket.socket:
    """Return a plain socket for a TLS connection. Owns ``tls`` from here on, even if this raises.

    When either connection ends, the other is ended after all bytes sent before were passed on. Bytes sent
    before the plain socket was closed still go to the peer, but are dropped if the peer accepts none of them
    for 10 s. ``where`` names the connection's other end in messages.

    Raises:
        OSError: no descriptor is left.
        TransportError: no thread can be started.
    """
    socks: list[socket.socket] = [tls]
    try:
        with no_fork:
            plain, near = socket.socketpair()
            close_after_fork(plain, near)
        socks += plain, near
        for sock in (tls, near):
            sock.setblocking(False)
        _Relay(tls, near).start()
    except BaseException as e:
        close_sockets(*socks)
        if isinstance(e, RuntimeError):
            raise TransportError(f"no thread can be started for the TLS connection to {where}: {e}") from e
        raise
    return plain


class _Relay:
    """The thread that carries the bytes until both connections have ended. A forked child lacks the thread,
    and its sockets are closed."""

    def __init__(self, far: ssl.SSLSocket, near: socket.socket) -> None:
        self._far = far
        self._near = near
        self._closing = threading.Lock()
        """Held while ``near`` is closed or shut down, since its number may belong to another file
        afterwards."""

    def start(self) -> None:
        """Raises RuntimeError."""
        BackgroundThread(self._run, name="kvplug-relay", stop=self._finish).start()

    def _finish(self) -> None:
        """Act as if the user had closed its socket."""
        with self._closing, contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        out, into = _Direction(self._near, self._far), _Direction(self._far, self._near)
        limit: float | None = None  # once near is closed: the time by which the peer must accept some bytes
        try:
            while True:
                if (out.move() | into.move()) and limit is not None:
                    limit = time.monotonic() + _LINGER_S
                if out.over and into.over:
                    break
                if limit is not None and limit <= time.monotonic():
                    return
                if self._wait(out, into, limit) and limit is None:
                    limit = time.monotonic() + _LINGER_S
                    into.stop()
            # Closing a TCP socket that holds unread bytes resets the connection, and undelivered bytes are
            # lost.
            limit = time.monotonic() + _LINGER_S
            while time.monotonic() < limit and _undelivered(self._far):
                time.sleep(_LINGER_POLL_S)
        finally:
            with self._closing:
                close_sockets(self._near, self._far)

    def _wait(self, out: _Direction, into: _Direction, limit: float | None) -> bool:
        """Wait until one direction can continue. Returns whether the near connection is closed."""
        masks: dict[int, int] = {}
        if limit is None:
            masks[self._near.fileno()] = 0  # polled for its end, which poll always reports
        for each in (out, into):
            if not each.over:
                sock, event = each.waits_for
                masks[sock.fileno()] = masks.get(sock.fileno(), 0) | event
        poller = select.poll()
        for fd, mask in masks.items():
            poller.register(fd, mask)
        ready = dict(poller.poll(None if limit is None else max(0.0, limit - time.monotonic()) * 1000))
        return bool(ready.get(self._near.fileno(), 0) & select.POLLHUP)


class _Direction:
    """Carries bytes from one non-blocking socket to another."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source = source
        self._sink = sink
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._unsent = self._buffer[:0]
        self.over = False
        """Whether this direction has ended."""
        self.waits_for: tuple[socket.socket, int] = (source, select.POLLIN)
        """The socket and the event that must come before more bytes can be carried."""

    def move(self) -> bool:
        """Carry as many bytes as possible without waiting. Returns whether any were sent."""
        moved = False
        while not self.over:
            self.waits_for = (self._sink, select.POLLOUT) if self._unsent else (self._source, select.POLLIN)
            try:
                if self._unsent:
                    self._unsent = self._unsent[self._sink.send(self._unsent) :]
                    moved = True
                else:
                    self._unsent = self._buffer[: self._source.recv_into(self._buffer)]
                    if not self._unsent:
                        self._end()
            except BlockingIOError:
                break
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
                is_reading = isinstance(e, ssl.SSLWantReadError)
                self.waits_for = self.waits_for[0], select.POLLIN if is_reading else select.POLLOUT
                break
            except OSError:
                self.stop() if self._unsent else self._end()
        return moved

    def _end(self) -> None:
        """End the direction: the source has ended, and everything was sent."""
        self.over = True
        with contextlib.suppress(OSError):  # without TLS's close_notify, since frames have lengths
            socket.socket.shutdown(self._sink, socket.SHUT_WR)

    def stop(self) -> None:
        """End the direction: the sink accepts nothing more."""
        self.over = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._source, socket.SHUT_RD)


def _undelivered(sock: socket.socket) -> int:
    try:
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            return 0  # reset by the peer: undelivered bytes are lost
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0
