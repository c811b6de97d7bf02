"""Carries bytes between two sockets, for what can only use a socket of its own kind.

A TLS connection becomes a plain socket, so that everything above reads, writes and polls it as any other. A
library that makes its own connections reaches its peer over a proven one.
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
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread

_BUFFER_BYTES = 256 * 1024
_LINGER_S = 10.0
"""After the near connection was closed: how long the peer may take nothing of what was sent before."""
_LINGER_POLL_S = 0.01
_SIOCOUTQ = 0x5411
_TCP_CLOSE = 7  # of <linux/tcp_states.h>
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def plain_end(tls: ssl.SSLSocket, where: str) -> socket.socket:
    """The plain socket of a TLS connection, which it owns from here on, also if it raises.

    ``where`` names the connection's other end in messages.

    Raises:
        OSError: no descriptor is left.
        TransportError: no thread can be started.
    """
    try:
        given, near = socket.socketpair()
    except BaseException:
        tls.close()
        raise
    try:
        Relay(tls, near, f"the TLS connection to {where}")
    except BaseException:
        given.close()
        raise
    return given


class Relay:
    """Carries bytes between two connected sockets, in a thread of its own, until both have ended.

    The end of either becomes the end of the other one, after everything that was sent before. ``far`` leads
    to the peer; ``near`` is one end of a connection within this process. What was sent before its other end
    was closed still goes to the peer; if the peer takes nothing of it for 10 s, it is dropped.

    Any thread may call any method, and so may a signal handler. In a forked child both sockets are closed.
    """

    def __init__(self, far: socket.socket, near: socket.socket, what: str) -> None:
        """Owns both sockets from here on, also if it raises. ``what`` names the connection in messages.

        Raises:
            TransportError: no thread can be started.
        """
        self._far = far
        self._near = near
        self._aborted = False
        self._closing = threading.RLock()
        """Held while a socket is closed or shut down: afterwards its number may be another file's."""
        self._thread = BackgroundThread(self._run, name="kvplug-relay", stop=self.finish)
        try:
            for sock in (far, near):
                sock.setblocking(False)
            close_after_fork(self)
            self._thread.start()
        except RuntimeError as e:
            self._close()
            raise TransportError(f"no thread can be started for {what}: {e}") from e
        except BaseException:
            self._close()
            raise

    @property
    def ended(self) -> bool:
        """Whether both sockets are closed."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """As if the other end of ``near`` were closed: a forked child may still hold it. Never waits."""
        self._shut_down(self._near)

    def abort(self) -> None:
        """End at once: what was not carried yet is dropped. Never waits."""
        self._aborted = True
        self._shut_down(self._near)
        self._shut_down(self._far)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until both have ended, for ``timeout`` seconds at most. Returns whether they have."""
        self._thread.join(timeout)
        return self.ended

    def _shut_down(self, sock: socket.socket) -> None:
        with self._closing, contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _close(self) -> None:
        with self._closing:
            self._near.close()
            self._far.close()

    def _after_fork_in_child(self) -> None:
        self._close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        out, into = _Direction(self._near, self._far), _Direction(self._far, self._near)
        closed_at: float | None = None  # of the near connection; later: of the last progress after that
        try:
            while not self._aborted:
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
            self._close()

    def _wait(self, out: _Direction, into: _Direction, pause: float | None, *, closed: bool) -> bool:
        """Until one of the two can go on. Returns whether the near connection was closed meanwhile."""
        masks = {self._far.fileno(): 0, self._near.fileno(): 0}
        for each in (out, into):
            if not each.over:
                sock, event = each.waits_for
                masks[sock.fileno()] |= event
        poller = select.poll()
        for fd, mask in masks.items():
            # The near socket is also polled for its end, which it has in any case.
            if mask or (fd == self._near.fileno() and not closed):
                poller.register(fd, mask)
        ready = dict(poller.poll(pause))
        return not closed and bool(ready.get(self._near.fileno(), 0) & select.POLLHUP)

    def _linger(self) -> None:
        """Until the peer's kernel has everything: closing a TCP socket that holds unread bytes resets the
        connection, and what was not delivered by then is lost.
        """
        limit = time.monotonic() + _LINGER_S
        while not self._aborted and time.monotonic() < limit and _undelivered(self._far):
            time.sleep(_LINGER_POLL_S)


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


def _undelivered(sock: socket.socket) -> int:
    try:
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            return 0  # reset by the peer: what was not delivered never is
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0
