"""Join of a reader: it proves itself, names its rank, and receives the ring's memory if it can share it.

    reader                                writer
    queue, rank, terms of watching   ->
                                     <-   which of the ring's readers it is, sizes, agreed terms, and the
                                          memory, over the Unix socket of this host; or why not
    that it is there                 ->
                                     <-   welcome

Each is one value in a frame of 1 KiB, over a connection whose two ends have proved themselves. If the join
fails before the last message, the rank is free again. Afterwards the connection of a reader that shares the
memory is only watched; otherwise it carries the messages (:mod:`kvplug_shm.queue.stream`).
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
from kvplug.transport import Connection, Deadline, Watch, WireError, peer_text
from kvplug_shm.queue.ring_buffer import ShmRingBuffer, Sizes

PURPOSE: Final = "queue-shm"
_FRAME_NBYTES: Final = 1024
_LENGTH_NBYTES: Final = 2
_LIMITS: Final = Limits(max_bytes=_FRAME_NBYTES, max_depth=2, max_items=64)
_MOST_WORDS: Final = 600
_SHORTEST_SILENCE_S: Final = 0.05
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


@attrs.define(kw_only=True)
class Peer:
    """The other end, and how to notice that it has died. Owns its ``pidfd``."""

    terms: Watch.Terms
    """As agreed."""
    heartbeat_timeout_s: float
    pidfd: int | None

    @property
    def silence_s(self) -> float | None:
        """The silence that counts as death; ``None``: both ends see the other's death."""
        return self.terms.silence_s(self.heartbeat_timeout_s, at_least_s=_SHORTEST_SILENCE_S)

    def take_pidfd(self) -> int | None:
        """The ``pidfd``, which the caller owns from here on."""
        pidfd, self.pidfd = self.pidfd, None
        return pidfd

    def watch(self, connection: Connection, on_gone: Callable[[str], None]) -> Watch:
        """Watch it by its pidfd, and with heartbeats unless both ends see the other's death.

        Raises:
            ClosedError: the connection was closed meanwhile.
            ResourceExhaustedError: this process can have no more descriptors, or threads.
        """
        silence_s, pidfd = self.silence_s, self.take_pidfd()
        if silence_s is None:
            return Watch(pidfd=pidfd, sock=connection.sock, on_gone=on_gone)
        return Watch(
            pidfd=pidfd,
            sock=connection.sock,
            interval_s=silence_s / Watch.Terms.BEATS_PER_TIMEOUT,
            timeout_s=silence_s,
            on_gone=on_gone,
        )

    def close(self) -> None:
        pidfd = self.take_pidfd()
        if pidfd is not None:
            os.close(pidfd)


# -- the reader's side -------------------------------------------------------------------------


@attrs.define(kw_only=True)
class Admitted(Peer):
    """The writer, which has admitted this reader."""

    index: int
    sizes: Sizes
    ring: ShmRingBuffer | None
    """The ring, if this reader shares its memory."""


def ask(
    connection: Connection,
    queue: str,
    rank: int,
    heartbeat_timeout_s: float,
    deadline: Deadline,
    *,
    shares_memory: bool,
) -> Admitted:
    """Ask the writer to admit this reader. :func:`confirm` must follow.

    Raises:
        ConfigError: the writer refuses this reader; says why.
        PeerGoneError: the writer is gone; another queue may listen there now.
        TimeoutError, ResourceExhaustedError, WireError: it failed.
    """
    pidfd = connection.peer.open_pidfd()
    fds: list[int] = []
    try:
        ours = Watch.Terms.of(heartbeat_timeout_s, sees_death=pidfd is not None)
        greeting = {"queue": queue, "rank": rank, "terms": list(attrs.astuple(ours))}
        with contextlib.suppress(PeerGoneError):  # declined already? Then the reason is waiting to be read.
            _send(connection, greeting, deadline)
        answer, fds = _receive(connection, int(shares_memory), deadline)
        match answer:
            case {"refused": str(why)}:
                raise ConfigError(peer_text(why))
            case {"gone": str(why)}:
                raise PeerGoneError(f"the writer of this queue is gone: {peer_text(why)}")
            case {"exhausted": str(resource), "why": str(why)}:
                raise ResourceExhaustedError(
                    f"{connection.describe} cannot admit this reader now: {peer_text(why)}",
                    resource=peer_text(resource),
                )
            case {
                "index": int(index),
                "sizes": [int(n_reader), int(max_chunks), int(max_chunk), int(max_message)],
                "terms": [bool(sees_death), int(heartbeat_ms)],
            } if (
                0 <= index < n_reader
                and min(max_chunks, max_chunk, max_message, heartbeat_ms) > 0
                and len(fds) == int(shares_memory)
            ):
                sizes = _sizes(connection, n_reader, max_chunks, max_chunk, max_message)
                return Admitted(
                    terms=ours.agreed(Watch.Terms(sees_death, heartbeat_ms)),
                    heartbeat_timeout_s=heartbeat_timeout_s,
                    index=index,
                    sizes=sizes,
                    ring=ShmRingBuffer.attach(sizes, fds[0]) if fds else None,
                    pidfd=pidfd,
                )
        raise WireError(f"{connection.describe} does not answer as the writer of a queue")
    except BaseException:
        if pidfd is not None:
            os.close(pidfd)
        raise
    finally:
        for fd in fds:
            os.close(fd)


def confirm(connection: Connection, deadline: Deadline) -> None:
    """Last step: this reader has what it needs.

    Raises:
        TimeoutError, PeerGoneError, WireError, TransportError: the writer did not welcome it.
    """
    _send(connection, "there", deadline)
    answer, _ = _receive(connection, 0, deadline)
    if answer != "welcome":
        raise TransportError(f"{connection.describe} did not confirm that this reader has joined")


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
class Joined:
    """A reader's part of the ring, and the connection that shows whether the writer lives."""

    ring: ShmRingBuffer
    index: int
    connection: Connection
    watch: Watch
    on_gone: LateCall
    """Called by the watch."""


def join(
    connection: Connection, queue: str, rank: int, heartbeat_timeout_s: float, deadline: Deadline
) -> Joined:
    """Join as a reader that shares the memory. Owns the connection, and closes it if it fails.

    Raises:
        As :func:`ask` and :func:`confirm`.
    """
    on_gone = LateCall()
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        writer = ask(connection, queue, rank, heartbeat_timeout_s, deadline, shares_memory=True)
        undo.callback(writer.close)
        watch: Watch | None = None
        if writer.silence_s is None:  # before the writer counts on this reader
            watch = writer.watch(connection, on_gone)
            undo.callback(watch.close)
        confirm(connection, deadline)
        if watch is None:  # heartbeats begin after the last message
            watch = writer.watch(connection, on_gone)
        undo.pop_all()
    assert writer.ring is not None
    return Joined(ring=writer.ring, index=writer.index, connection=connection, watch=watch, on_gone=on_gone)


# -- the writer's side -------------------------------------------------------------------------


@attrs.define(kw_only=True)
class Asked(Peer):
    """A reader, which asks to be admitted."""

    queue: str
    rank: int


def asked(connection: Connection, heartbeat_timeout_s: float, deadline: Deadline) -> Asked:
    """First step: read the request.

    Raises:
        TimeoutError, PeerGoneError, WireError.
    """
    pidfd = connection.peer.open_pidfd()
    try:
        greeting, _ = _receive(connection, 0, deadline)
        match greeting:
            case {
                "queue": str(queue),
                "rank": int(rank),
                "terms": [bool(sees_death), int(heartbeat_ms)],
            } if heartbeat_ms > 0:
                ours = Watch.Terms.of(heartbeat_timeout_s, sees_death=pidfd is not None)
                return Asked(
                    terms=ours.agreed(Watch.Terms(sees_death, heartbeat_ms)),
                    heartbeat_timeout_s=heartbeat_timeout_s,
                    queue=queue,
                    rank=rank,
                    pidfd=pidfd,
                )
        raise WireError(f"{connection.describe} does not ask as the reader of a queue")
    except BaseException:
        if pidfd is not None:
            os.close(pidfd)
        raise


def refuse(connection: Connection, why: str, deadline: Deadline) -> None:
    """Second step, if the reader is refused."""
    _send(connection, {"refused": why[:_MOST_WORDS]}, deadline)


def miss(connection: Connection, deadline: Deadline) -> None:
    """Second step, if the reader asks for a queue that is not here."""
    _send(connection, {"gone": "another queue listens at its address now"}, deadline)


def decline(connection: Connection, shortage: ResourceExhaustedError, deadline: Deadline) -> None:
    """Second step, if the writer's process has no resources for the reader now. It may try again."""
    answer = {"exhausted": shortage.resource, "why": str(shortage)[:_MOST_WORDS]}
    _send(connection, answer, deadline)


def admit(
    connection: Connection,
    reader: Asked,
    index: int,
    sizes: Sizes,
    memory: Sequence[int],
    deadline: Deadline,
) -> None:
    """Second step, if the reader is admitted; returns when it has what it needs.

    ``memory``: the descriptor of the ring's memory, if the reader shares it.

    Raises:
        TimeoutError, PeerGoneError, ResourceExhaustedError, WireError.
    """
    answer = {
        "index": index,
        "sizes": [sizes.n_reader, sizes.max_chunks, sizes.max_chunk_bytes, sizes.max_message_bytes],
        "terms": list(attrs.astuple(reader.terms)),
    }
    _send(connection, answer, deadline, memory)
    there, _ = _receive(connection, 0, deadline)
    if there != "there":
        raise WireError(f"{connection.describe} does not confirm that it has joined")


def welcome(connection: Connection, deadline: Deadline) -> None:
    """Last step. Heartbeats may follow."""
    _send(connection, "welcome", deadline)


# -- frames ------------------------------------------------------------------------------------


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
