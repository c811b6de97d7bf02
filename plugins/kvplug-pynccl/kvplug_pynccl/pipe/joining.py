"""How one proven connection becomes a pipe.

The connecting end says which NCCL it has. The accepting end answers with a unique id, and when the
communicator of that one is there, with another one: one for each direction. They cross this connection only,
and none is made for which nobody comes. Both ends say when they have both. An end that fails says why.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import select
import socket
import struct
from typing import Final

import attrs

from kvplug import KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.transport import Connection, Deadline, WireError
from kvplug_pynccl.device import Stream
from kvplug_pynccl.interface import check_reach
from kvplug_pynccl.nccl.abi import UNIQUE_ID_BYTES, UniqueId, Version
from kvplug_pynccl.pipe.pipe import PyncclPipe, Tuning
from kvplug_pynccl.pipe.way import Way
from kvplug_pynccl.watched import Communicator

PURPOSE: Final = "pipe-pynccl"
_MAGIC: Final = b"KVC1"
_STRUCT: Final = struct.Struct(f"<4sBBxxII{UNIQUE_ID_BYTES}s256s")
_HELLO, _ID, _READY, _FAILED = range(4)
_SEES_DEATH: Final = 1
_ACCEPTED, _CONNECTED = 0, 1
"""The ranks of the two ends."""
_LEAST_SILENCE_S: Final = 0.05
"""However impatient a peer says it is, or this end is: each beats five times in it."""
_LONGEST_REASON: Final = 256
_LAST_WORDS_S: Final = 0.2


@attrs.frozen(kw_only=True)
class Join:
    """What both ends say while they become a pipe."""

    step: int
    sees_death: bool = True
    """The sender has a pidfd of the other end; answered: both have, so no heartbeats are needed."""
    heartbeat_ms: int = 0
    """Silence that the sender takes for death, where heartbeats are needed."""
    version: int = 0
    """Of the sender's NCCL."""
    id: bytes = bytes(UNIQUE_ID_BYTES)
    reason: str = ""

    def pack(self) -> bytes:
        reason = self.reason.encode("utf-8", "replace")[:_LONGEST_REASON]
        return _STRUCT.pack(
            _MAGIC, self.step, self.sees_death, self.heartbeat_ms, self.version, self.id, reason
        )

    @classmethod
    def unpack(cls, data: bytes, connection: Connection, *expected: int) -> Join:
        """Raises WireError: it is not what comes now. TransportError: the other end failed, and why."""
        magic, step, flags, heartbeat_ms, version, id_, reason = _STRUCT.unpack(data)
        if magic != _MAGIC or step not in (*expected, _FAILED):
            raise WireError(f"{connection.describe} does not join as this version does")
        said = reason.rstrip(b"\0").decode("utf-8", "replace")
        if step == _FAILED:
            raise TransportError(f"{connection.describe} cannot be the other end of a pipe: {said}")
        return cls(
            step=step, sees_death=bool(flags), heartbeat_ms=heartbeat_ms, version=version, id=id_, reason=said
        )

    def longest_silence_s(self, ours: float) -> float | None:
        """What both ends take for death, given what was agreed; ``None``: they see it."""
        return None if self.sees_death else max(_LEAST_SILENCE_S, min(self.heartbeat_ms / 1000, ours))


def connect(connection: Connection, tuning: Tuning, deadline: Deadline) -> PyncclPipe:
    """The connecting end's pipe over a connection, which it owns from here on.

    Raises:
        TimeoutError, PeerGoneError, WireError: there is no pipe, and the connection is closed.
        TransportError: NCCL, here or there, and why.
    """
    return _Joining(connection, tuning, deadline, _CONNECTED).pipe()


def accept(connection: Connection, tuning: Tuning, deadline: Deadline) -> PyncclPipe:
    """The same for the accepting end. Raises the same."""
    return _Joining(connection, tuning, deadline, _ACCEPTED).pipe()


class _Joining:
    """A pipe in the making."""

    def __init__(self, connection: Connection, tuning: Tuning, deadline: Deadline, rank: int) -> None:
        self._connection = connection
        self._tuning = tuning
        self._deadline = deadline
        self._rank = rank
        self._communicators: list[Communicator] = []
        self._streams: list[Stream] = []
        self._pidfd: int | None = None
        self._begun: bytes = b""

    def pipe(self) -> PyncclPipe:
        connection, tuning = self._connection, self._tuning
        try:
            self._pidfd = connection.peer.open_pidfd()
            check_reach(connection.peer)
            agreed = self._agreed()
            nccl, device = tuning.nccl, tuning.device
            self._streams = [device.new_stream(), device.new_stream()]
            self._begin(agreed)
            self._begin(self._hear(_ID) if self._rank == _CONNECTED else self._invited(Join(step=_ID)))
            self._say(Join(step=_READY))
            self._hear(_READY)
            ways = [
                Way(nccl, comm, stream, 1 - self._rank)
                for comm, stream in zip(self._communicators, self._streams, strict=True)
            ]
            # The first is that from the accepting end to the other.
            return PyncclPipe(
                connection,
                ways[self._rank],
                ways[1 - self._rank],
                tuning,
                pidfd=self._pidfd,
                heartbeat_s=agreed.longest_silence_s(tuning.heartbeat_timeout_s),
            )
        except BaseException as e:
            if isinstance(e, KvplugError) and not isinstance(e, PeerGoneError | WireError):
                self._say_why(str(e))
            for comm in self._communicators:
                comm.abort()
            for stream in self._streams:
                stream.close()
            connection.close()
            raise
        finally:
            if self._pidfd is not None:
                os.close(self._pidfd)

    def _agreed(self) -> Join:
        """What the accepting end says to both."""
        nccl, timeout_s = self._tuning.nccl, self._tuning.heartbeat_timeout_s
        ours = Join(
            step=_HELLO,
            sees_death=self._pidfd is not None,
            heartbeat_ms=max(1, min(int(timeout_s * 1000), 2**32 - 1)),
            version=nccl.version.code,
        )
        if self._rank == _CONNECTED:
            self._say(ours)
            answer = self._hear(_ID)
            self._check_version(answer)
            return answer
        theirs = self._hear(_HELLO)
        self._check_version(theirs)
        return self._invited(
            attrs.evolve(
                ours,
                step=_ID,
                sees_death=ours.sees_death and theirs.sees_death,
                heartbeat_ms=max(1, min(ours.heartbeat_ms, theirs.heartbeat_ms)),
            )
        )

    def _invited(self, answer: Join) -> Join:
        """The same, with an id; the other end has been told."""
        answer = attrs.evolve(answer, id=bytes(self._tuning.nccl.get_unique_id()))
        self._say(answer)
        return answer

    def _check_version(self, theirs: Join) -> None:
        ours = self._tuning.nccl.version
        if theirs.version != ours.code:
            raise TransportError(
                f"{self._connection.describe} has NCCL {Version.of(theirs.version)}, and this end has {ours}:"
                " the ranks of a communicator need the same release"
            )

    def _begin(self, invited: Join) -> None:
        comm = Communicator(
            self._tuning.nccl,
            UniqueId.of(invited.id),
            2,
            self._rank,
            what=f"NCCL with {self._connection.describe}",
            current=self._tuning.device.current,
        )
        self._communicators.append(comm)
        comm.wait_until_settled(self._deadline, self._look)

    def _look(self) -> None:
        """While NCCL starts: whether the other end has failed, or is gone."""
        size = _STRUCT.size
        if len(self._begun) == 2 * size or not self._is_readable():
            return
        self._begun += self._receive(2 * size - len(self._begun))
        if len(self._begun) >= size:  # it is faster, or has failed
            Join.unpack(self._begun[:size], self._connection, _ID, _READY)
        if len(self._begun) == 2 * size:  # it was faster, and has failed now
            Join.unpack(self._begun[size:], self._connection)

    def _say(self, join: Join) -> None:
        sock = self._connection.sock
        try:
            sock.settimeout(self._seconds())
            sock.sendall(join.pack())
        except builtins.TimeoutError as e:
            raise self._late() from e
        except OSError as e:
            raise self._gone() from e

    def _say_why(self, reason: str) -> None:
        """And let the other end read it: a socket that is closed with bytes unread loses what it has sent."""
        self._deadline = Deadline.after(_LAST_WORDS_S)
        with contextlib.suppress(KvplugError, OSError):
            self._say(Join(step=_FAILED, reason=reason))
            self._connection.sock.shutdown(socket.SHUT_WR)
            while self._receive(_STRUCT.size):
                if self._deadline.expired:
                    return

    def _hear(self, expected: int) -> Join:
        data, self._begun = self._begun[: _STRUCT.size], self._begun[_STRUCT.size :]
        while len(data) < _STRUCT.size:
            data += self._receive(_STRUCT.size - len(data))
        return Join.unpack(data, self._connection, expected)

    def _receive(self, count: int) -> bytes:
        sock = self._connection.sock
        if not count:
            return b""
        try:
            sock.settimeout(self._seconds())
            chunk = sock.recv(count)
        except builtins.TimeoutError as e:
            raise self._late() from e
        except OSError as e:
            raise self._gone() from e
        if not chunk:
            raise self._gone()
        return chunk

    def _is_readable(self) -> bool:
        poller = select.poll()
        poller.register(self._connection.sock, select.POLLIN)
        return bool(poller.poll(0))

    def _seconds(self) -> float | None:
        left = self._deadline.remaining()
        return None if left is None else max(0.001, left)

    def _late(self) -> TimeoutError:
        return TimeoutError(f"{self._connection.describe} did not become the other end of a pipe in time")

    def _gone(self) -> PeerGoneError:
        return PeerGoneError(f"{self._connection.describe} hung up while a pipe was made")
