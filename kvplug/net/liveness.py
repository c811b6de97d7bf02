"""One watcher per process: it notices that a peer has died and calls back.

Three signs, alone or together; the first one counts:

- a **pidfd** becomes readable when the process has ended (also while it is an unreaped zombie, and also when
  a child of it keeps its sockets open). A stopped or busy process is alive.
- a **socket** reports that the other end hung up.
- a **heartbeat** on a connection of its own: silence longer than its timeout counts as death. For peers that
  a pidfd cannot see: other hosts, other pid namespaces. There, a process that is stopped for that long
  counts as dead, since it cannot be distinguished from a vanished host.

The thread starts with the first watch and ends with the last one. Callbacks run in it, outside all locks, and
must not block: they hold up every other watch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs

from kvplug.errors import ClosedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork, free_locks_after_fork
from kvplug.net.threads import BackgroundThread

logger = logging.getLogger(__name__)

_BEAT = b"\x01"
_READ_BYTES = 4096

_READABLE = select.EPOLLIN
_HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP


def _positive(_: Any, attribute: Any, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be more than 0 seconds, got {value!r}")


@attrs.frozen(eq=False)
class Heartbeat:
    """A dedicated connection on which both ends send a byte now and then. Both ends must watch it.

    The socket stays the caller's, who closes it after the watch; it is made non-blocking.
    """

    sock: socket.socket
    """The connection; nothing else is sent over it."""
    interval_s: float = attrs.field(default=2.0, validator=_positive)
    """Seconds between the bytes we send."""
    timeout_s: float = attrs.field(default=10.0, validator=_positive)
    """Seconds of silence that count as death: several times the *other* end's interval."""

    def __attrs_post_init__(self) -> None:
        if self.timeout_s <= self.interval_s:
            raise ValueError(
                f"a heartbeat's timeout ({self.timeout_s} s) must be longer than its interval"
                f" ({self.interval_s} s)"
            )


class Watch:
    """One peer being watched. Made by :func:`watch`."""

    def __init__(
        self,
        pidfd: int | None,
        sock: socket.socket | None,
        heartbeat: Heartbeat | None,
        on_gone: Callable[[str], None],
    ) -> None:
        self._pidfd = pidfd
        self._sock = sock
        self._heartbeat = heartbeat
        self._on_gone = on_gone
        self._fds: dict[int, int] = {}
        if pidfd is not None:
            self._fds[pidfd] = _READABLE
        if sock is not None:
            self._fds[sock.fileno()] = _HUNG_UP
        if heartbeat is not None:
            fd = heartbeat.sock.fileno()
            self._fds[fd] = self._fds.get(fd, 0) | _READABLE | _HUNG_UP
        self._heard = self._next_beat = time.monotonic()
        self._closed = False
        self.reason: str | None = None
        """Why the peer counts as gone; ``None`` while it is alive."""

    def __repr__(self) -> str:
        state = f"gone: {self.reason}" if self.reason else "closed" if self._closed else "alive"
        return f"<Watch, {state}>"

    def close(self) -> None:
        """Stop watching. Idempotent; never calls back and never waits for a callback under way."""
        _drop(self, None)

    def _event(self, fd: int, now: float) -> str | None:
        """Why the peer is gone, now that something happened at ``fd``; ``None`` if it is not."""
        if fd == self._pidfd:
            return "its process ended"
        if self._heartbeat is not None and fd == self._heartbeat.sock.fileno():
            return self._hear(now)
        return "it closed the connection"

    def _tick(self, now: float) -> tuple[str | None, float]:
        """Send a beat and check for silence, if due. Returns (why the peer is gone, when to call again)."""
        beat = self._heartbeat
        if beat is None:
            return None, float("inf")
        if now >= self._next_beat:
            self._next_beat = now + beat.interval_s
            try:
                beat.sock.send(_BEAT)
            except BlockingIOError:
                pass  # its buffer is full of beats: it does not read, and its silence will show that
            except OSError:
                return "it closed the connection", now
        if now - self._heard >= beat.timeout_s:
            # This process may have been stopped: what came meanwhile is still in the buffer.
            reason = self._hear(now)
            if reason is not None:
                return reason, now
            if now - self._heard >= beat.timeout_s:
                return f"silent for {now - self._heard:.1f} s", now
        return None, min(self._next_beat, self._heard + beat.timeout_s)

    def _hear(self, now: float) -> str | None:
        assert self._heartbeat is not None
        try:
            if not self._heartbeat.sock.recv(_READ_BYTES):
                return "it closed the connection"
        except BlockingIOError:
            return None
        except OSError:
            return "it closed the connection"
        self._heard = now
        return None


def watch(
    *,
    pidfd: int | None = None,
    sock: socket.socket | None = None,
    heartbeat: Heartbeat | None = None,
    on_gone: Callable[[str], None],
) -> Watch:
    """Call ``on_gone(reason)`` once, in the watcher's thread, when the peer is gone; then the watch is over.

    ``pidfd`` is duplicated: the caller may close its own. ``sock`` is only polled for the other end hanging
    up, never read (what has arrived can still be received): close the watch before the socket. All signs
    may be given; a peer that is gone already is reported too.

    Raises:
        ValueError: nothing to watch was given, or that socket is watched already.
        ClosedError: the socket is closed.
        ResourceExhaustedError: the process has no free descriptor, or can start no more threads.
    """
    if pidfd is None and sock is None and heartbeat is None:
        raise ValueError("nothing to watch: give a pidfd, a socket or a heartbeat")
    if any(s.fileno() < 0 for s in _sockets(sock, heartbeat)):
        raise ClosedError("the socket to watch is closed")
    if heartbeat is not None:
        heartbeat.sock.setblocking(False)
    with NamedExhaustion("watching a peer"):
        own_pidfd = None if pidfd is None else os.dup(pidfd)
        made = Watch(own_pidfd, sock, heartbeat, on_gone)
        try:
            _add(made)
        except BaseException:
            if own_pidfd is not None:
                os.close(own_pidfd)
            raise
    return made


def _sockets(sock: socket.socket | None, heartbeat: Heartbeat | None) -> list[socket.socket]:
    return [s for s in (sock, heartbeat.sock if heartbeat else None) if s is not None]


class _Loop:
    """The watcher's thread, what it polls and what it knows. Everything but ``run`` is called locked."""

    def __init__(self) -> None:
        self.wake_in, self.wake_out = socket.socketpair()
        try:
            self.poller = select.epoll()
        except BaseException:
            self.wake_in.close()
            self.wake_out.close()
            raise
        for sock in (self.wake_in, self.wake_out):
            sock.setblocking(False)
        self.poller.register(self.wake_out.fileno(), _READABLE)
        self.watches: set[Watch] = set()
        self.by_fd: dict[int, Watch] = {}
        self.stopped = False
        self.thread = BackgroundThread(self.run, name="kvplug liveness", stop=self.stop)
        close_after_fork(self)

    def add(self, new: Watch) -> None:
        for fd in new._fds:
            old = self.by_fd.get(fd)
            # The number of a socket that was closed under its watch may come back: that is no clash.
            if old is not None and any(s.fileno() == fd for s in _sockets(old._sock, old._heartbeat)):
                raise ValueError("that socket is watched already")
        done = []
        try:
            for fd, mask in new._fds.items():
                self.poller.register(fd, mask)
                done.append(fd)
        except BaseException:
            for fd in done:
                self.poller.unregister(fd)
            raise
        self.watches.add(new)
        self.by_fd.update(dict.fromkeys(new._fds, new))

    def remove(self, old: Watch) -> None:
        self.watches.discard(old)
        for fd in old._fds:
            if self.by_fd.get(fd) is old:
                del self.by_fd[fd]
                with contextlib.suppress(OSError, KeyError):  # closed already: the kernel forgot it
                    self.poller.unregister(fd)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake anyway
            self.wake_in.send(b"x")

    def stop(self) -> None:
        """The program leaves: watch nothing any more. Takes no lock."""
        self.stopped = True
        self.wake()

    def close(self) -> None:
        self.poller.close()
        self.wake_in.close()
        self.wake_out.close()

    def _after_fork_in_child(self) -> None:
        """There is no such thread. The epoll set is the parent's too: only close it here."""
        global _loop
        _loop = None
        for each in self.watches:
            each._closed = True
            if each._pidfd is not None:
                with contextlib.suppress(OSError):
                    os.close(each._pidfd)
        self.close()

    def run(self) -> None:
        global _loop
        pause: float | None = 0.0  # judge the first watch at once: it may have a heartbeat
        try:
            while True:
                self.poll(pause)
                gone: list[tuple[Watch, str]] = []
                with _lock:
                    if not self.watches or self.stopped:
                        return
                    # Polled again under the lock, when no watch is added or removed: a descriptor that was
                    # ready may have been closed since, and its number reused.
                    events = self.poll(0.0)
                    now = time.monotonic()
                    again = float("inf")
                    for fd in events:
                        found = self.by_fd.get(fd)
                        if found is not None:
                            reason = found._event(fd, now)
                            if reason is not None:
                                gone.append((found, reason))
                    for each in self.watches:
                        reason, at = each._tick(now)
                        again = min(again, at)
                        if reason is not None:
                            gone.append((each, reason))
                    pause = None if again == float("inf") else max(0.0, again - now)
                for each, reason in gone:
                    if _drop(each, reason):
                        try:
                            each._on_gone(reason)
                        except Exception:
                            logger.exception("a callback of the liveness watcher failed")
        except Exception:
            logger.exception("the liveness watcher stops: a fault of kvplug")
        finally:
            with _lock:
                if _loop is self:
                    _loop = None
                self.close()

    def poll(self, pause: float | None) -> list[int]:
        events = self.poller.poll(pause)
        with contextlib.suppress(BlockingIOError):
            self.wake_out.recv(_READ_BYTES)
        return [fd for fd, _ in events]


_lock = threading.RLock()  # a signal's handler may end a watch while its thread ends or adds one
free_locks_after_fork(sys.modules[__name__])
_loop: _Loop | None = None


def _add(new: Watch) -> None:
    global _loop
    with _lock:
        started = _loop
        loop = started or _Loop()
        try:
            loop.add(new)
            if started is None:
                loop.thread.start()  # it waits for the lock
        except BaseException:
            if started is None:
                loop.close()
            raise
        _loop = loop  # also if there was one: a signal's handler may have ended its last watch meanwhile
        if started is not None:
            loop.wake()


def _drop(old: Watch, reason: str | None) -> bool:
    """End a watch; False if it had ended already."""
    global _loop
    with _lock:
        if old._closed:
            return False
        old._closed = True
        old.reason = reason
        loop = _loop
        if loop is not None and old in loop.watches:
            loop.remove(old)
            if not loop.watches:
                _loop = None  # its thread sees that nothing is left, and ends
            loop.wake()
        if old._pidfd is not None:
            os.close(old._pidfd)
    return True
