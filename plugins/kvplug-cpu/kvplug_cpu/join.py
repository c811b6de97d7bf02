"""Joining several proven connections to one pipe.

The connecting end opens a control connection and says how many data connections it wants; the listening end
answers with a random session id and the number agreed on. Each data connection then presents the id, after
its own proof. When all are there the listening end says so on the control connection. Every message is one
fixed struct.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Final

import attrs

from kvplug import TransportError
from kvplug.transport import Connection, Deadline, HeartbeatTerms, JoinStream, WireError
from kvplug_cpu.pipe import CpuPipe, CpuPipeSettings

PURPOSE: Final = "pipe-cpu"
CONTROL: Final = 0
"""The index of the control connection; data connections count from 1."""
_READY = 255
_MAGIC = b"KVJ1"
_STRUCT = struct.Struct("<4sBBBxI16s")
_SEES_DEATH = 1
_SHORTEST_BEAT_S = 0.001
_UNUSED = HeartbeatTerms(True, 0)
_SEND_S = 10.0
"""One message fits into any socket's buffer, so sending never waits."""


@attrs.frozen(kw_only=True)
class Join:
    """The message of both ends while they join connections."""

    index: int
    connections: int
    """The number of data connections."""
    terms: HeartbeatTerms = _UNUSED
    """The sender's own; answered: what was agreed."""
    session: bytes = b"\0" * 16

    def send(self, connection: Connection) -> None:
        """Raises PeerGoneError."""
        flags = _SEES_DEATH if self.terms.sees_death else 0
        data = _STRUCT.pack(
            _MAGIC, self.index, self.connections, flags, self.terms.heartbeat_ms, self.session
        )
        _stream(connection).send(data, Deadline.after(_SEND_S))

    @classmethod
    def receive(cls, connection: Connection, deadline: Deadline) -> Join:
        """Raises TimeoutError, PeerGoneError, WireError."""
        data = _stream(connection).receive(_STRUCT.size, deadline)
        magic, index, connections, flags, heartbeat_ms, session = _STRUCT.unpack(data)
        if magic != _MAGIC:
            raise WireError(f"{connection.describe} does not join connections as this version does")
        return cls(
            index=index,
            connections=connections,
            terms=HeartbeatTerms(bool(flags & _SEES_DEATH), heartbeat_ms),
            session=session,
        )

    def heartbeat_interval_s(self, settings: CpuPipeSettings) -> float | None:
        """Seconds between heartbeats of both ends, as agreed; ``None``: no heartbeats."""
        return self.terms.interval_s(settings.heartbeat_timeout_s, at_least_s=_SHORTEST_BEAT_S)


def _stream(connection: Connection) -> JoinStream:
    return JoinStream(
        connection,
        late="did not join the parts of a pipe in time",
        gone="hung up while a pipe was joined",
    )


def connect(
    dial: Callable[[], Connection], count: int, settings: CpuPipeSettings, deadline: Deadline
) -> CpuPipe:
    """The connecting end: a pipe of ``count`` data connections, or of fewer if the other end allows fewer.

    Raises:
        TimeoutError, PeerGoneError, WireError, and what ``dial`` raises.
    """
    opened: list[Connection] = []
    pidfd: int | None = None
    try:
        control = dial()
        opened.append(control)
        pidfd = control.peer.open_pidfd()
        ours = HeartbeatTerms.of(settings.heartbeat_timeout_s, sees_death=pidfd is not None)
        Join(index=CONTROL, connections=count, terms=ours).send(control)
        answer = Join.receive(control, deadline)
        agreed = answer.connections
        if not 1 <= agreed <= count:
            raise WireError(f"{control.describe} wants {agreed} data connections; {count} were offered")
        for index in range(1, agreed + 1):
            data = dial()
            opened.append(data)
            Join(index=index, connections=agreed, session=answer.session).send(data)
        if Join.receive(control, deadline).index != _READY:
            raise TransportError(f"{control.describe} did not confirm the pipe")
        owned, pidfd = pidfd, None
        interval_s = answer.heartbeat_interval_s(settings)
        return CpuPipe(control, opened[1:], settings, pidfd=owned, heartbeat_interval_s=interval_s)
    except BaseException:
        if pidfd is not None:
            os.close(pidfd)
        for connection in opened:
            connection.close()
        raise


def say_ready(control: Connection, session: bytes) -> None:
    """The listening end, before the pipe is made: heartbeats may follow on the same connection."""
    Join(index=_READY, connections=0, session=session).send(control)
