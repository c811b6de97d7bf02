"""One watcher per process, which notices that a peer has died and calls back.

It uses up to three signs together; the first to appear counts:

- a **pidfd** becomes readable when the process has ended, even if the process is an unreaped zombie or a
  child of it keeps its sockets open. A stopped or busy process is alive.
- a **socket** reports that the other end hung up.
- a **heartbeat** on a connection of its own: silence longer than its timeout counts as death. It serves peers
  that a pidfd cannot see, on other hosts or in other pid namespaces. Such a process counts as dead if it is
  stopped for that long, since it cannot be distinguished from a vanished host.

The watcher's thread starts with the first watch and ends with the last. Callbacks run in this thread, outside
all locks. They must not block, since they hold up every other watch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Container
from typing import Any, ClassVar, Final, Self

import attrs

from kvplug.errors import ClosedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork, free_locks_after_fork, no_fork
from kvplug.net.threads import BackgroundThread

logger = logging.getLogger(__name__)

_BEAT = b"\x01"
_CLOSED = "it closed the connection"
_READ_BYTES = 4096

_HUNG_UP = select.POLLRDHUP | select.POLLHUP
_MAX_MS: Final = 2**32 - 1
"""The largest ``heartbeat_ms`` that a join message can hold."""
_MAX_PAUSE_MS: Final = 3_600_000.0


class Watch:
    """Watches one peer. When the peer is gone, sets :attr:`reason` and calls ``on_gone`` once."""

    @attrs.frozen
    class Terms:
        """The terms that one end states when it joins; :meth:`agreed` computes the terms that hold for both.

        >>> ours, theirs = Watch.Terms.of(10.0, sees_death=True), Watch.Terms.of(4.0, sees_death=False)
        >>> ours.agreed(theirs).silence_s()
        4.0
        """

        BEATS_PER_TIMEOUT: ClassVar[int] = 5
        """How many heartbeats an end sends within the silence that counts as its death."""

        sees_death: bool
        """Whether this end has a pidfd of the other. In agreed terms: whether both have one, so that no
        heartbeats are needed."""
        heartbeat_ms: int
        """Milliseconds of silence that this end counts as death, where heartbeats are needed."""

        @classmethod
        def of(cls, timeout_s: float, *, sees_death: bool) -> Self:
            """Return the terms of an end whose config has ``timeout_s`` as its ``heartbeat_timeout_s``."""
            return cls(sees_death, max(1, min(int(timeout_s * 1000), _MAX_MS)))

        def agreed(self, theirs: Watch.Terms) -> Watch.Terms:
            """Return the terms that hold for both ends. Symmetric."""
            return Watch.Terms(
                self.sees_death and theirs.sees_death, min(self.heartbeat_ms, theirs.heartbeat_ms)
            )

        def silence_s(self, timeout_s: float | None = None, *, at_least_s: float = 0.0) -> float | None:
            """Return the seconds of silence that count as death, or ``None`` if both ends have a pidfd and
            send no heartbeats.

            The result exceeds ``timeout_s`` only if ``at_least_s`` does. The agreed time is in whole
            milliseconds.
            """
            if self.sees_death:
                return None
            agreed_s = self.heartbeat_ms / 1000
            return max(at_least_s, agreed_s if timeout_s is None else min(agreed_s, timeout_s))

        def interval_s(self, timeout_s: float, *, at_least_s: float) -> float | None:
            """Return the seconds between two heartbeats of one end, for :class:`Watch`, or ``None`` without
            heartbeats."""
            silence_s = self.silence_s(timeout_s)
            return None if silence_s is None else max(at_least_s, silence_s / self.BEATS_PER_TIMEOUT)

    def __init__(
        self,
        *,
        pidfd: int | None = None,
        sock: socket.socket | None = None,
        interval_s: float | None = None,
        timeout_s: float = 10.0,
        on_gone: Callable[[str], None],
    ) -> None:
        """Watch a peer by its pidfd, by a connection to it, or by both. Also reports a peer that is already
        gone.

        Args:
            pidfd: The watch owns it from here on, even if this raises.
            sock: The caller still owns it, and must close the watch first. Without ``interval_s`` the watch
                never reads it, but only polls it for a hang-up of the other end, so that data that has
                arrived can still be received.
            interval_s: Seconds between the bytes that each end sends on ``sock``, which carries nothing else
                and becomes non-blocking. ``None``: no heartbeats.
            timeout_s: With heartbeats, the seconds of silence that count as death: several times the interval
                of the *other* end.
            on_gone: Called once with the reason, in the watcher's thread, after the watch has ended. Must
                not block.

        Raises:
            ValueError: neither a pidfd nor a socket was given, or the interval is not between 0 and
                ``timeout_s``.
            ClosedError: the socket is closed.
            ResourceExhaustedError: the process has no free descriptor, or can start no more threads.
        """
        self._pidfd = pidfd
        self._sock = sock
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_gone = on_gone
        self._fds: dict[int, int] = {}
        self._last_received = self._next_beat = time.monotonic()
        self._closed = False
        self.reason: str | None = None
        """Why the peer counts as gone; ``None`` while it is alive."""
        try:
            self._check()
            if pidfd is not None:
                self._fds[pidfd] = select.POLLIN
            if sock is not None:
                self._fds[sock.fileno()] = _HUNG_UP if interval_s is None else select.POLLIN | _HUNG_UP
                if interval_s is not None:
                    sock.setblocking(False)
            with NamedExhaustion("watching a peer"):
                _add(self)
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            raise

    def _check(self) -> None:
        """Raises ValueError, ClosedError."""
        if self._sock is None and (self._pidfd is None or self._interval_s is not None):
            raise ValueError("nothing to watch: give a pidfd or a socket; heartbeats need a socket")
        if self._sock is not None and self._sock.fileno() < 0:
            raise ClosedError("the socket to watch is closed")
        if self._interval_s is not None and not 0 < self._interval_s < self._timeout_s:
            raise ValueError(
                f"a heartbeat's timeout ({self._timeout_s} s) must be longer than its interval"
                f" ({self._interval_s} s), which must be more than 0"
            )

    def __repr__(self) -> str:
        state = f"gone: {self.reason}" if self.reason else "closed" if self._closed else "alive"
        return f"<Watch, {state}>"

    def close(self) -> None:
        """Stop watching. Idempotent; never calls back and never waits for a callback under way."""
        _drop(self, None)

    def _judge(self, events: Container[int], now: float) -> str | None:
        """Return why the peer is gone, or ``None``. Sends a heartbeat if one is due. ``events``: descriptors
        with an event."""
        ready = any(fd in events for fd in self._fds)
        if self._pidfd in events:
            return "its process ended"
        if self._interval_s is None or self._sock is None:
            return _CLOSED if ready else None
        try:
            if now >= self._next_beat:
                self._next_beat = now + self._interval_s
                with contextlib.suppress(BlockingIOError):
                    self._sock.send(_BEAT)  # a peer that does not read does not send either
            # Read after a silence too: this process may have been stopped while heartbeats arrived in the
            # buffer.
            if ready or now - self._last_received >= self._timeout_s:
                with contextlib.suppress(BlockingIOError):
                    if not self._sock.recv(_READ_BYTES):
                        return _CLOSED
                    # Not ``now``: this process may have been stopped since.
                    self._last_received = time.monotonic()
        except OSError:
            return _CLOSED
        silence_s = now - self._last_received
        return f"silent for {silence_s:.1f} s" if silence_s >= self._timeout_s else None

    def _due_at(self) -> float:
        """Return the time by which the watch must be judged again, even without an event."""
        if self._interval_s is None:
            return math.inf
        return min(self._next_beat, self._last_received + self._timeout_s)


class _Loop:
    """The watcher's thread and its state. Code that reads or changes the state holds the lock."""

    def __init__(self) -> None:
        self.wake_in, self.wake_out = socket.socketpair()
        for sock in (self.wake_in, self.wake_out):
            sock.setblocking(False)
        self.watches: set[Watch] = set()
        self.poller: Any = None
        """Polls the descriptors of all watches; ``None`` after a watch was added or ended."""
        self.stopped = False
        self.thread = BackgroundThread(self.run, name="kvplug liveness", stop=self.stop)
        close_after_fork(self)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full, so the thread wakes anyway
            self.wake_in.send(b"x")

    def stop(self) -> None:
        """Stop watching when the program exits. Takes no lock."""
        self.stopped = True
        self.wake()

    def close(self) -> None:
        with no_fork:
            self.wake_in.close()
            self.wake_out.close()

    def _after_fork_in_child(self) -> None:
        """Forget the thread, which the child lacks."""
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
        poller, pause_ms = select.poll(), 0.0  # judge the first watch at once, since it may need a heartbeat
        try:
            while True:
                poller.poll(pause_ms)
                with contextlib.suppress(BlockingIOError):
                    self.wake_out.recv(_READ_BYTES)
                with _lock:
                    if not self.watches or self.stopped:
                        return
                    if self.poller is None:
                        self.poller = select.poll()
                        self.poller.register(self.wake_out, select.POLLIN)
                        for each in self.watches:
                            for fd, mask in each._fds.items():
                                self.poller.register(fd, mask)
                    poller = self.poller
                    # Poll again under the lock: a descriptor that was ready may be closed by now, and its
                    # number used for another watch.
                    events, now = dict(poller.poll(0)), time.monotonic()
                    reasons = {each: each._judge(events, now) for each in self.watches}
                    due_at = min(each._due_at() for each in self.watches)
                for each, reason in reasons.items():
                    if reason is not None and _drop(each, reason):
                        try:
                            each._on_gone(reason)
                        except Exception:
                            logger.exception("a callback of the liveness watcher failed")
                pause_ms = min(max(0.0, due_at - time.monotonic()) * 1000, _MAX_PAUSE_MS)
        except Exception:
            logger.exception("the liveness watcher stops because of a fault in kvplug")
        finally:
            with _lock:
                if _loop is self:
                    _loop = None
                self.close()


_lock = threading.RLock()  # re-entrant: a signal handler may end a watch while its thread holds it
free_locks_after_fork(sys.modules[__name__])
_loop: _Loop | None = None


def _add(new: Watch) -> None:
    global _loop
    with _lock:
        started = _loop
        with no_fork:
            loop = started or _Loop()
        try:
            loop.watches.add(new)
            loop.poller = None
            if started is None:
                loop.thread.start()  # the thread waits for the lock
        except BaseException:
            loop.watches.discard(new)
            if started is None:
                loop.close()
            raise
        _loop = loop  # set even if unchanged: a signal handler may have ended its last watch meanwhile
        loop.wake()


def _drop(old: Watch, reason: str | None) -> bool:
    """End a watch; return False if it had already ended."""
    global _loop
    with _lock:
        if old._closed:
            return False
        old._closed = True
        old.reason = reason
        loop = _loop
        with no_fork:
            if loop is not None and old in loop.watches:
                loop.watches.remove(old)
                loop.poller = None
                if not loop.watches:
                    _loop = None  # its thread sees that no watch is left, and ends
                loop.wake()
            if old._pidfd is not None:
                os.close(old._pidfd)
    return True
