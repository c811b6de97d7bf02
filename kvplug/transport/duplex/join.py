"""What two ends exchange over a proven connection before it is a pipe, and how they watch each other then.

An end that has a pidfd of the other's process sees it end. If one of the two has none, on different hosts or
in different pid namespaces, both send heartbeats, and silence counts as death. The shorter timeout of the two
ends is used, so that both send often enough.
"""

from __future__ import annotations

import builtins
import os
import socket
from collections.abc import Callable
from typing import ClassVar, Final, Self

import attrs

from kvplug.errors import PeerGoneError, TimeoutError
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import raise_if_exhausted
from kvplug.net.liveness import Heartbeat, Watch, watch
from kvplug.net.trust.connection import Connection
from kvplug.net.wire.frames import HEADER_SIZE


class JoinStream:
    """Sends and receives whole messages over ``connection`` until a deadline. It stays its owner's.

    The texts end the sentence that begins with the peer: ``late`` after the deadline ("did not join in
    time"), ``gone`` when it hung up.
    """

    def __init__(self, connection: Connection, *, late: str, gone: str) -> None:
        self._connection = connection
        self._late = late
        self._gone = gone

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Raises TimeoutError, PeerGoneError; ResourceExhaustedError: here, or at the peer."""
        sock = self._connection.sock
        try:
            sock.settimeout(_seconds(deadline))
            sock.sendall(data)
            sock.settimeout(None)
        except OSError as e:
            raise_if_exhausted(e, f"joining {self._connection.describe}")
            self._check_last_word()
            raise self._error(e) from e

    def _check_last_word(self) -> None:
        """The peer has hung up: raise what it said of a resource that it lacked, if it did."""
        try:
            data = self._connection.sock.recv(HEADER_SIZE, socket.MSG_DONTWAIT)
        except OSError:
            return
        self._connection.raise_if_declined(data, Deadline.after(0))

    def receive(self, nbytes: int, deadline: Deadline) -> bytes:
        """Exactly so many bytes.

        Raises:
            TimeoutError, PeerGoneError: they did not come.
            ResourceExhaustedError: the peer has no resources to go on; or this process has none.
        """
        data = b""
        while len(data) < nbytes:
            data += self.receive_some(nbytes - len(data), deadline)
            self._connection.raise_if_declined(data, deadline)
        self._connection.sock.settimeout(None)
        return data

    def receive_some(self, nbytes: int, deadline: Deadline) -> bytes:
        """One byte at least, ``nbytes`` at most. Raises TimeoutError, PeerGoneError."""
        sock = self._connection.sock
        try:
            sock.settimeout(_seconds(deadline))
            chunk = sock.recv(nbytes)
        except OSError as e:
            raise_if_exhausted(e, f"joining {self._connection.describe}")
            raise self._error(e) from e
        if not chunk:
            raise PeerGoneError(f"{self._connection.describe} {self._gone}")
        return chunk

    def _error(self, error: OSError) -> Exception:
        if isinstance(error, builtins.TimeoutError):
            return TimeoutError(f"{self._connection.describe} {self._late}")
        return PeerGoneError(f"{self._connection.describe} {self._gone}")


def _seconds(deadline: Deadline) -> float | None:
    """For ``settimeout``, where 0 would mean not to wait at all."""
    left = deadline.remaining()
    return None if left is None else max(0.001, left)


_MAX_MS: Final = 2**32 - 1
"""What fits the field of a join message."""


@attrs.frozen
class HeartbeatTerms:
    """The terms of one end when it joins; :meth:`agreed` computes those that hold for both.

    >>> ours, theirs = HeartbeatTerms.of(10.0, sees_death=True), HeartbeatTerms.of(4.0, sees_death=False)
    >>> ours.agreed(theirs).silence_s()
    4.0
    """

    BEATS_PER_TIMEOUT: ClassVar[int] = 5
    """How many heartbeats an end sends in the silence that would count as its death."""

    sees_death: bool
    """The end has a pidfd of the other; agreed: both have, so no heartbeats are needed."""
    heartbeat_ms: int
    """Milliseconds of silence that count as death for this end, where heartbeats are needed."""

    @classmethod
    def of(cls, timeout_s: float, *, sees_death: bool) -> Self:
        """Of an end whose config has ``timeout_s`` as its ``heartbeat_timeout_s``."""
        return cls(sees_death, max(1, min(int(timeout_s * 1000), _MAX_MS)))

    def agreed(self, theirs: HeartbeatTerms) -> HeartbeatTerms:
        """The terms of both ends together. Symmetric."""
        return HeartbeatTerms(
            self.sees_death and theirs.sees_death, min(self.heartbeat_ms, theirs.heartbeat_ms)
        )

    def silence_s(self, timeout_s: float | None = None, *, at_least_s: float = 0.0) -> float | None:
        """Seconds of silence that count as death; ``None``: both ends have a pidfd and send no heartbeats.

        At most ``timeout_s``, which milliseconds round.
        """
        if self.sees_death:
            return None
        agreed_s = self.heartbeat_ms / 1000
        return max(at_least_s, agreed_s if timeout_s is None else min(agreed_s, timeout_s))

    def interval_s(self, timeout_s: float, *, at_least_s: float) -> float | None:
        """Seconds between two heartbeats of one end; ``None``: it sends none. For :func:`watch_peer`."""
        silence_s = self.silence_s(timeout_s)
        return None if silence_s is None else max(at_least_s, silence_s / self.BEATS_PER_TIMEOUT)


def watch_peer(
    sock: socket.socket,
    *,
    pidfd: int | None,
    interval_s: float | None,
    timeout_s: float,
    on_gone: Callable[[str], None],
) -> Watch:
    """Watch the peer by its ``pidfd`` and its connection. Owns the pidfd from here on, also if it raises.

    Args:
        sock: A connection to the peer that carries nothing else if ``interval_s`` is given.
        interval_s: Seconds between heartbeats on that connection; ``None``: there are none, and it is only
            looked at for the peer hanging up.
        timeout_s: Seconds of silence that count as death, with heartbeats.
        on_gone: Called once with the reason, in the watcher's thread; it must not block.

    Raises:
        ValueError, ClosedError: as :func:`kvplug.transport.watch`.
    """
    try:
        beat = None if interval_s is None else Heartbeat(sock, interval_s=interval_s, timeout_s=timeout_s)
        return watch(pidfd=pidfd, sock=None if beat else sock, heartbeat=beat, on_gone=on_gone)
    finally:
        if pidfd is not None:
            os.close(pidfd)  # the watch has its own
