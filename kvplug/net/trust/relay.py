"""Carries bytes between two sockets, for code that can only use one kind of socket.

A relay turns a TLS connection into a plain socket, which all other code can read, write and poll like any
other. It also lets a library that makes its own connections reach its peer over a proven connection.
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
from kvplug.net.fork import close_after_fork, no_fork
from kvplug.net.threads import BackgroundThread

_BUFFER_BYTES = 256 * 1024
_LINGER_S = 10.0
"""How long the peer may accept none of the remaining bytes after the near connection was closed."""
_LINGER_POLL_S = 0.01
_SIOCOUTQ = 0x5411
_TCP_CLOSE = 7  # of <linux/tcp_states.h>


def plain_end(tls: ssl.SSLSocket, where: str) -> socket.socket:
    """Return a plain socket for a TLS connection. Owns ``tls`` from here on, even if this raises.

    ``where`` names the connection's other end in messages.

    Raises:
        OSError: no descriptor is left.
        TransportError: no thread can be started.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(tls.close)
        with no_fork:
            given, near = socket.socketpair()
            close_after_fork(given, near)
        undo.callback(given.close)
        Relay(tls, near, f"the TLS connection to {where}")
        undo.pop_all()
    return given


class Relay:
    """Carries bytes between two connected sockets, in a thread of its own, until both have ended.

    When either connection ends, the relay ends the other after passing on all bytes sent before. ``far``
    leads to the peer; ``near`` is one end of a connection within this process. Bytes sent before the other
    end of ``near`` was closed still go to the peer, but are dropped if the peer accepts none of them for
    10 s.

    Any thread or signal handler may call any method. A forked child closes both sockets.
    """

    def __init__(self, far: socket.socket, near: socket.socket, what: str) -> None:
        """Owns both sockets from here on, even if this raises. ``what`` names the connection in messages.

        Raises:
            TransportError: no thread can be started.
        """
        self._far = far
        self._near = near
        self._aborted = False
        self._closing = threading.RLock()
        """Held while a socket is closed or shut down, since its number may belong to another file
        afterwards."""
        self._thread = BackgroundThread(self._run, name="kvplug-relay", stop=self.finish)
        try:
            for sock in (far, near):
                sock.setblocking(False)
            close_after_fork(self, far, near)
            self._thread.start()
        except BaseException as e:
            self._close()
            if isinstance(e, RuntimeError):
                raise TransportError(f"no thread can be started for {what}: {e}") from e
            raise

    @property
    def ended(self) -> bool:
        """Whether both sockets are closed."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Act as if the other end of ``near`` were closed, since a forked child may still hold it. Never
        waits."""
        self._shut_down(self._near)

    def abort(self) -> None:
        """End at once and drop all bytes in transit. Never waits."""
        self._aborted = True
        self._shut_down(self._near)
        self._shut_down(self._far)

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds until both have ended. Returns whether they have."""
        self._thread.join(timeout)
        return self.ended

    def _shut_down(self, sock: socket.socket) -> None:
        with self._closing, contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _close(self) -> None:
        with self._closing, no_fork:
            self._near.close()
            self._far.close()

    def _after_fork_in_child(self) -> None:
        """The sockets close themselves; only the lock must be free."""

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        out, into = _Direction(self._near, self._far), _Direction(self._far, self._near)
        limit: float | None = None  # once near is closed: the time by which the peer must accept some bytes
        try:
            while not self._aborted:
                if (out.move() | into.move()) and limit is not None:
                    limit = time.monotonic() + _LINGER_S
                if out.over and into.over:
                    break
                if limit is not None and limit <= time.monotonic():
                    return
                if self._wait(out, into, limit) and limit is None:
                    limit = time.monotonic() + _LINGER_S
                    into.stop()
            self._linger()
        finally:
            self._close()

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

    def _linger(self) -> None:
        """Wait until the peer's kernel has everything. Closing a TCP socket that holds unread bytes resets
        the connection, and undelivered bytes are lost.
        """
        limit = time.monotonic() + _LINGER_S
        while not self._aborted and time.monotonic() < limit and _undelivered(self._far):
            time.sleep(_LINGER_POLL_S)


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
