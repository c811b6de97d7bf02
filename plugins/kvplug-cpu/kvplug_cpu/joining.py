"""How several proven connections become one pipe.

The connecting end opens a control connection and says how many lanes it wants; the listening end answers
with a random session id and the number agreed on. Each lane then presents the id, after its own proof. When
all are there the listening end says so on the control connection. Every message is one fixed struct.
"""

from __future__ import annotations

import builtins
import os
import struct
from collections.abc import Callable

import attrs

from kvplug import PeerGoneError, TimeoutError, TransportError
from kvplug.transport import Connection, Deadline, WireError
from kvplug_cpu.pipe import CpuPipe, Tuning

PURPOSE = "pipe-cpu"
CONTROL = 0
"""The index of the control connection; lanes count from 1."""
_READY = 255
_MAGIC = b"KVJ1"
_STRUCT = struct.Struct("<4sBBBxI16s")
_BEATS_PER_TIMEOUT = 5
_SEES_DEATH = 1


@attrs.frozen(kw_only=True)
class Join:
    """What both ends say while they join connections."""

    index: int
    lanes: int
    sees_death: bool
    """The sender has a pidfd of the other end; answered: both have, so no heartbeats are needed."""
    heartbeat_ms: int = 0
    """Silence that the sender takes for death, where heartbeats are needed."""
    session: bytes = b"\0" * 16

    def send(self, connection: Connection) -> None:
        """Raises PeerGoneError. It fits into any socket's buffer, so that nobody waits."""
        flags = _SEES_DEATH if self.sees_death else 0
        try:
            connection.sock.sendall(
                _STRUCT.pack(_MAGIC, self.index, self.lanes, flags, self.heartbeat_ms, self.session)
            )
        except OSError as e:
            raise PeerGoneError(f"{connection.describe} hung up while a pipe was joined") from e

    @classmethod
    def receive(cls, connection: Connection, deadline: Deadline) -> Join:
        """Raises TimeoutError, PeerGoneError, WireError."""
        data = b""
        sock = connection.sock
        try:
            while len(data) < _STRUCT.size:
                left = deadline.remaining()
                sock.settimeout(None if left is None else max(0.001, left))
                chunk = sock.recv(_STRUCT.size - len(data))
                if not chunk:
                    raise PeerGoneError(f"{connection.describe} hung up while a pipe was joined")
                data += chunk
            sock.settimeout(None)
        except builtins.TimeoutError as e:
            raise TimeoutError(f"{connection.describe} did not join the parts of a pipe in time") from e
        except PeerGoneError:
            raise
        except OSError as e:
            raise PeerGoneError(f"{connection.describe} hung up while a pipe was joined") from e
        magic, index, lanes, flags, heartbeat_ms, session = _STRUCT.unpack(data)
        if magic != _MAGIC:
            raise WireError(f"{connection.describe} does not join connections as this version does")
        return cls(
            index=index,
            lanes=lanes,
            sees_death=bool(flags & _SEES_DEATH),
            heartbeat_ms=heartbeat_ms,
            session=session,
        )

    def heartbeat_interval_s(self, tuning: Tuning) -> float | None:
        """How often both ends beat, given what the other end said; ``None``: not at all.

        The more impatient of the two decides, so that neither takes the other's pace for silence.
        """
        if self.sees_death:
            return None
        return max(0.001, min(self.heartbeat_ms / 1000, tuning.heartbeat_timeout_s) / _BEATS_PER_TIMEOUT)


def connect(dial: Callable[[], Connection], lanes: int, tuning: Tuning, deadline: Deadline) -> CpuPipe:
    """The connecting end: a pipe of ``lanes`` lanes, or of fewer if the other end wants it so.

    Raises:
        TimeoutError, PeerGoneError, WireError, and what ``dial`` raises.
    """
    opened: list[Connection] = []
    pidfd: int | None = None
    try:
        control = dial()
        opened.append(control)
        pidfd = control.peer.open_pidfd()
        patience_ms = milliseconds(tuning.heartbeat_timeout_s)
        Join(index=CONTROL, lanes=lanes, sees_death=pidfd is not None, heartbeat_ms=patience_ms).send(control)
        answer = Join.receive(control, deadline)
        if not 1 <= answer.lanes <= lanes:
            raise WireError(f"{control.describe} wants {answer.lanes} lanes; {lanes} were offered")
        for index in range(1, answer.lanes + 1):
            lane = dial()
            opened.append(lane)
            Join(index=index, lanes=answer.lanes, sees_death=True, session=answer.session).send(lane)
        if Join.receive(control, deadline).index != _READY:
            raise TransportError(f"{control.describe} did not confirm the pipe")
        owned, pidfd = pidfd, None
        interval_s = answer.heartbeat_interval_s(tuning)
        return CpuPipe(control, opened[1:], tuning, pidfd=owned, heartbeat_interval_s=interval_s)
    except BaseException:
        if pidfd is not None:
            os.close(pidfd)
        for connection in opened:
            connection.close()
        raise


def milliseconds(seconds: float) -> int:
    """What fits the field."""
    return max(1, min(int(seconds * 1000), 2**32 - 1))


def say_ready(control: Connection, session: bytes) -> None:
    """The listening end, before the pipe is made: heartbeats may follow on the same connection."""
    Join(index=_READY, lanes=0, sees_death=True, session=session).send(control)
