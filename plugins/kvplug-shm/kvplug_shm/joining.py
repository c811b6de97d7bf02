"""How a pipe or a queue's reader joins: values over a proven connection, and a watch on the other process.

Each message is one value in a frame of 1 KiB. The descriptor of shared memory comes with a message. Each end
states whether it sees the other's death, and after how much silence it counts the other as dead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from kvplug.net.wire import Limits, decode, encode
from kvplug.transport import Connection, Deadline, Watch, WireError

_FRAME_NBYTES: Final = 1024
_LENGTH_NBYTES: Final = 2
_LIMITS: Final = Limits(max_bytes=_FRAME_NBYTES, max_depth=2, max_items=64)
_SHORTEST_SILENCE_S: Final = 0.05
"""The least silence that counts as death, whatever the ends ask for: each heartbeat wakes both ends."""


class JoiningPeer:
    """The other end. Owns a pidfd of its process and the descriptors that it sent, but not the connection."""

    def __init__(self, connection: Connection, heartbeat_timeout_s: float, deadline: Deadline) -> None:
        """Raises PeerGoneError, ResourceExhaustedError."""
        self.connection = connection
        self.fds: list[int] = []
        """What it sent, in order."""
        self.deadline = deadline
        self._timeout_s = heartbeat_timeout_s
        self._pidfd = connection.peer.open_pidfd()
        self._terms = Watch.Terms.of(heartbeat_timeout_s, sees_death=self._pidfd is not None)

    def send(self, value: object, fds: Sequence[int] = ()) -> None:
        """Raises TimeoutError, PeerGoneError, ResourceExhaustedError: the peer lacks a resource."""
        data = encode(value, limits=_LIMITS)
        frame = len(data).to_bytes(_LENGTH_NBYTES, "little") + data
        self.connection.send(frame.ljust(_FRAME_NBYTES, b"\0"), self.deadline, fds)

    def introduce(self, fields: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send ``fields`` and this end's terms. Raises as :meth:`send`."""
        self.send({**fields, "terms": list(attrs.astuple(self._terms))}, fds)

    def receive(self, max_fds: int = 0) -> Any:
        """Return the next value. Its descriptors are appended to :attr:`fds`.

        Raises:
            TimeoutError, PeerGoneError: it did not arrive.
            WireError: the bytes are not a value, or more than ``max_fds`` descriptors came.
            ResourceExhaustedError: one of the two processes lacks a resource.
        """
        frame, fds = self.connection.receive_fds(_FRAME_NBYTES, max_fds, self.deadline)
        self.fds += fds
        length = int.from_bytes(frame[:_LENGTH_NBYTES], "little")
        return decode(frame[_LENGTH_NBYTES : _LENGTH_NBYTES + length], limits=_LIMITS)

    def expect(self, word: str) -> None:
        """Receive this word. Raises as :meth:`receive`."""
        if self.receive() != word:
            raise self.not_understood()

    def agrees(self, introduction: dict[str, Any]) -> bool:
        """Agree on the terms of an introduction that was received. False if it has none."""
        match introduction:
            case {"terms": [bool(sees_death), int(heartbeat_ms)]} if heartbeat_ms > 0:
                self._terms = self._terms.agreed(Watch.Terms(sees_death, heartbeat_ms))
                return True
        return False

    def not_understood(self) -> WireError:
        """Return the error for a value that is not the expected one."""
        return WireError(f"{self.connection.describe} does not join as this version does")

    @property
    def silence_s(self) -> float | None:
        """The agreed silence that counts as death; ``None``: both ends see the other's death."""
        return self._terms.silence_s(self._timeout_s, at_least_s=_SHORTEST_SILENCE_S)

    def take_pidfd(self) -> int | None:
        """Return the pidfd, which the caller owns from here on."""
        pidfd, self._pidfd = self._pidfd, None
        return pidfd

    def watch(self, on_gone: Callable[[str], None]) -> Watch:
        """Watch the process by its pidfd, and with heartbeats unless both ends see the other's death.

        Raises:
            ClosedError: the connection was closed meanwhile.
            ResourceExhaustedError: this process can have no more descriptors, or threads.
        """
        silence_s, pidfd, sock = self.silence_s, self.take_pidfd(), self.connection.sock
        if silence_s is None:
            return Watch(pidfd=pidfd, sock=sock, on_gone=on_gone)
        interval_s = silence_s / Watch.Terms.BEATS_PER_TIMEOUT
        return Watch(pidfd=pidfd, sock=sock, interval_s=interval_s, timeout_s=silence_s, on_gone=on_gone)

    def watch_from(self, last_step: Callable[[], object], on_gone: Callable[[str], None]) -> Watch:
        """Make the last step of the join, and watch the process: from before it, so that an end that cannot
        watch does not join, or from after it with heartbeats, which must not come before it.

        Raises as :meth:`watch` and ``last_step``.
        """
        watch = self.watch(on_gone) if self.silence_s is None else None
        try:
            last_step()
            return watch or self.watch(on_gone)
        except BaseException:
            if watch is not None:
                watch.close()
            raise

    def close(self) -> None:
        """Close the descriptors that nothing has taken over. Idempotent."""
        fds, self.fds = self.fds, []
        pidfd = self.take_pidfd()
        for fd in (*fds, *([] if pidfd is None else [pidfd])):
            os.close(fd)
