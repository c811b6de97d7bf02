"""Join of a reader on the writer's host: it sends its identity and receives the ring's memory.

    reader                                writer
    rank, whether it sees our death  ->
                                     <-   which of the ring's readers it is, sizes, and the memory; or why not
    that it has mapped it            ->
                                     <-   welcome

Each is one value in a frame of 1 KiB, over a connection whose two ends have proved themselves. If the join
fails before the last message, the rank is free again. Afterwards the connection is only watched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from kvplug import ConfigError, PeerGoneError, ResourceExhaustedError, TransportError
from kvplug.net.wire import Limits, decode, encode
from kvplug.transport import (
    Connection,
    Deadline,
    Watch,
    WireError,
    peer_text,
)
from kvplug_shm.queue.ring_buffer import ShmRingBuffer, Sizes

PURPOSE: Final = "queue-shm"
_FRAME_NBYTES: Final = 1024
_LENGTH_NBYTES: Final = 2
_LIMITS: Final = Limits(max_bytes=_FRAME_NBYTES, max_depth=2, max_items=64)
_MOST_WORDS: Final = 600
_BEATS_PER_TIMEOUT: Final = 5
_SHORTEST_PATIENCE_S: Final = 0.05
"""The least silence that counts as death, whatever the other end asks for: each heartbeat wakes both ends."""


class LateCall:
    """A function that is known later; a call that came before is made then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._function: Callable[[str], None] | None = None
        self._before: list[str] = []

    def __call__(self, reason: str) -> None:
        with self._lock:
            function = self._function
            if function is None:
                self._before.append(reason)
        if function is not None:
            function(reason)

    def be(self, function: Callable[[str], None]) -> None:
        """Call that function, also for calls that have come."""
        with self._lock:
            self._function = function
            before, self._before = self._before, []
        for reason in before:
            function(reason)


@attrs.frozen(kw_only=True)
class Joined:
    """A reader's part of the ring, and the connection that shows whether the writer lives."""

    ring: ShmRingBuffer
    index: int
    connection: Connection
    watch: Watch | None
    """On the writer, if there are no heartbeats; it calls ``on_gone``."""
    on_gone: LateCall
    pidfd: int | None
    """For :func:`watched`, with heartbeats."""
    heartbeat_s: tuple[float, float] | None


def join(connection: Connection, rank: int, heartbeat_timeout_s: float, deadline: Deadline) -> Joined:
    """The reader's side. Owns the connection, and closes it if it fails.

    Raises:
        ConfigError: the writer refuses this reader; says why.
        TimeoutError, PeerGoneError, ResourceExhaustedError, WireError, TransportError: it failed.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        pidfd = connection.peer.open_pidfd()
        undo_pidfd = undo.enter_context(contextlib.ExitStack())
        if pidfd is not None:
            undo_pidfd.callback(os.close, pidfd)
        greeting = {"rank": rank, "sees_death": pidfd is not None, "patience_s": float(heartbeat_timeout_s)}
        with contextlib.suppress(PeerGoneError):  # declined already? Then the reason is waiting to be read.
            _send(connection, greeting, deadline)
        answer, fds = _receive(connection, 1, deadline)
        try:
            match answer:
                case {"refused": str(why)}:
                    raise ConfigError(peer_text(why))
                case {"exhausted": str(resource), "why": str(why)}:
                    raise ResourceExhaustedError(
                        f"{connection.describe} cannot admit this reader now: {peer_text(why)}",
                        resource=peer_text(resource),
                    )
                case {
                    "index": int(index),
                    "sizes": [int(n_reader), int(max_chunks), int(max_chunk), int(max_message)],
                    "quiet": bool(quiet),
                    "patience_s": float(patience_s),
                } if 0 <= index < n_reader and min(max_chunks, max_chunk, max_message) > 0 and len(fds) == 1:
                    sizes = _sizes(connection, n_reader, max_chunks, max_chunk, max_message)
                    ring = ShmRingBuffer.attach(sizes, fds[0])
                case _:
                    raise WireError(f"{connection.describe} does not answer as the writer of a queue")
        finally:
            for fd in fds:
                os.close(fd)
        watch: Watch | None = None
        on_gone = LateCall()
        if quiet:  # before the writer counts on this reader; heartbeats begin after the last message
            undo_pidfd.pop_all()
            watch = watched(connection, pidfd, None, on_gone)
            undo.callback(watch.close)
        _send(connection, "mapped", deadline)
        welcome, _ = _receive(connection, 0, deadline)
        if welcome != "welcome":
            raise TransportError(f"{connection.describe} did not confirm that this reader has joined")
        undo_pidfd.pop_all()
        undo.pop_all()
    return Joined(
        ring=ring,
        index=index,
        connection=connection,
        watch=watch,
        on_gone=on_gone,
        pidfd=pidfd,
        heartbeat_s=None if quiet else _pace(min(patience_s, heartbeat_timeout_s)),
    )


def _sizes(connection: Connection, n_reader: int, max_chunks: int, max_chunk: int, max_message: int) -> Sizes:
    """Raises WireError: no queue can have these."""
    try:
        return Sizes(
            n_reader=n_reader,
            max_chunks=max_chunks,
            max_chunk_bytes=max_chunk,
            max_message_bytes=max_message,
        )
    except ConfigError as e:
        raise WireError(f"{connection.describe} states sizes that no queue has: {e}") from e


@attrs.frozen(kw_only=True)
class Asked:
    """A reader's request to join."""

    rank: int
    quiet: bool
    """Both ends see the other's death by a pidfd, so that there are no heartbeats."""
    patience_s: float
    """Silence that counts as death: the shorter timeout of the two ends."""

    @property
    def heartbeat_s(self) -> tuple[float, float] | None:
        return None if self.quiet else _pace(self.patience_s)


def asked(connection: Connection, heartbeat_timeout_s: float, sees_death: bool, deadline: Deadline) -> Asked:
    """The writer's side, first step: read the request.

    Raises:
        TimeoutError, PeerGoneError, WireError.
    """
    greeting, _ = _receive(connection, 0, deadline)
    match greeting:
        case {"rank": int(rank), "sees_death": bool(sees), "patience_s": float(patience_s)} if patience_s > 0:
            patience_s = min(patience_s, float(heartbeat_timeout_s))
            return Asked(rank=rank, quiet=sees and sees_death, patience_s=patience_s)
    raise WireError(f"{connection.describe} does not ask as the reader of a queue")


def refuse(connection: Connection, why: str, deadline: Deadline) -> None:
    """Second step, if the reader is refused."""
    _send(connection, {"refused": why[:_MOST_WORDS]}, deadline)


def decline(connection: Connection, shortage: ResourceExhaustedError, deadline: Deadline) -> None:
    """Second step, if the writer's process has no resources for the reader now. It may try again."""
    answer = {"exhausted": shortage.resource, "why": str(shortage)[:_MOST_WORDS]}
    _send(connection, answer, deadline)


def hand_over(
    connection: Connection, by: Asked, index: int, sizes: Sizes, fd: int, deadline: Deadline
) -> None:
    """Second step, if it is accepted; returns when the reader has the memory.

    Raises:
        TimeoutError, PeerGoneError, ResourceExhaustedError, WireError.
    """
    answer = {
        "index": index,
        "sizes": [sizes.n_reader, sizes.max_chunks, sizes.max_chunk_bytes, sizes.max_message_bytes],
        "quiet": by.quiet,
        "patience_s": by.patience_s,
    }
    _send(connection, answer, deadline, [fd])
    mapped, _ = _receive(connection, 0, deadline)
    if mapped != "mapped":
        raise WireError(f"{connection.describe} does not confirm that it has the memory")


def welcome(connection: Connection, deadline: Deadline) -> None:
    """Last step. Heartbeats may follow."""
    _send(connection, "welcome", deadline)


def watched(
    connection: Connection,
    pidfd: int | None,
    heartbeat_s: tuple[float, float] | None,
    on_gone: Callable[[str], None],
) -> Watch:
    """Watch the other end by its pidfd, if there is one, or by heartbeats. Owns the ``pidfd``.

    Raises:
        ClosedError: the connection was closed meanwhile.
        ResourceExhaustedError: this process can have no more descriptors, or threads.
    """
    if heartbeat_s is None:
        return Watch(pidfd=pidfd, sock=connection.sock, on_gone=on_gone)
    interval_s, timeout_s = heartbeat_s
    return Watch(
        pidfd=pidfd, sock=connection.sock, interval_s=interval_s, timeout_s=timeout_s, on_gone=on_gone
    )


def _pace(patience_s: float) -> tuple[float, float]:
    """The heartbeat of both ends: interval, and the silence that counts as death."""
    patience_s = max(patience_s, _SHORTEST_PATIENCE_S) if patience_s > 0 else _SHORTEST_PATIENCE_S
    return patience_s / _BEATS_PER_TIMEOUT, patience_s


def _send(connection: Connection, value: object, deadline: Deadline, fds: Sequence[int] = ()) -> None:
    data = encode(value, limits=_LIMITS)
    frame = len(data).to_bytes(_LENGTH_NBYTES, "little") + data
    connection.send(frame.ljust(_FRAME_NBYTES, b"\0"), deadline, fds)


def _receive(connection: Connection, max_fds: int, deadline: Deadline) -> tuple[Any, list[int]]:
    frame, fds = connection.receive_fds(_FRAME_NBYTES, max_fds, deadline)
    length = int.from_bytes(frame[:_LENGTH_NBYTES], "little")
    try:
        return decode(frame[_LENGTH_NBYTES : _LENGTH_NBYTES + length], limits=_LIMITS), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def hang_up(connection: Connection) -> None:
    """Close the connection, after waking a thread that is inside a call on it."""
    with contextlib.suppress(OSError):
        connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
