"""The listening end: connections are joined to pipes, several to each."""

from __future__ import annotations

import os
import secrets
import threading
import time

import attrs

from kvplug import ClosedError, PeerGoneError, ResourceExhaustedError, TimeoutError
from kvplug.transport import Connection, Deadline, HeartbeatTerms, Listener, Pipe, PipeAcceptor
from kvplug_cpu.join import CONTROL, Join, say_ready
from kvplug_cpu.pipe import CpuPipe, CpuPipeSettings

_JOIN_TIMEOUT_S = 10.0
"""How long the connections of one pipe may take to arrive, once the first has proved itself."""


@attrs.define(eq=False)
class _Session:
    """A pipe in the making."""

    connections: dict[int, Connection] = attrs.field(factory=dict)
    """The data connections, which this object owns until they are a pipe."""
    began: float = attrs.field(factory=time.monotonic)
    """Before its data connections can come."""
    complete: bool = False
    shortage: ResourceExhaustedError | None = None
    """What this process lacked for a connection that may be one of them."""


class CpuListener(PipeAcceptor):
    """Owns its listeners."""

    def __init__(
        self, listeners: list[Listener], contact: str, *, max_connections: int, settings: CpuPipeSettings
    ) -> None:
        self._max_connections = max_connections
        self._settings = settings
        self._joining = threading.RLock()
        self._arrived = threading.Condition(self._joining)
        self._sessions: dict[bytes, _Session] = {}
        self._ends = False
        super().__init__(listeners, transport="cpu", contact=contact, timeout_s=settings.timeout_s)

    def close(self) -> None:
        with self._joining:
            self._ends = True
            self._arrived.notify_all()
        super().close()

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        for session in list(self._sessions.values()):
            for connection in list(session.connections.values()):
                connection.close()

    def _join(self, connection: Connection) -> Pipe | None:
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        join = Join.receive(connection, deadline)
        if join.index == CONTROL:
            return self._gather(connection, join, deadline)
        self._hand_over(connection, join)
        return None

    def _note_shortage(self, connection: Connection, shortage: ResourceExhaustedError) -> None:
        super()._note_shortage(connection, shortage)
        with self._joining:  # it may be a data connection: its pipe would wait for it in vain
            for session in self._sessions.values():
                if session.began < connection.since:
                    session.shortage = shortage
            self._arrived.notify_all()

    def _hand_over(self, connection: Connection, join: Join) -> None:
        with self._joining:
            session = self._sessions.get(join.session)
            if session is None or session.complete or join.index in session.connections:
                raise PeerGoneError("it belongs to no pipe that is being joined")
            self.release(connection)  # before the pipe is there, whose user may close this listener
            session.connections[join.index] = connection
            self._arrived.notify_all()

    def _gather(self, control: Connection, join: Join, deadline: Deadline) -> CpuPipe:
        count = max(1, min(join.connections, self._max_connections))
        session_id, session = secrets.token_bytes(16), _Session()
        pidfd = control.peer.open_pidfd()
        try:
            ours = HeartbeatTerms.of(self._settings.heartbeat_timeout_s, sees_death=pidfd is not None)
            with self._joining:
                self._sessions[session_id] = session
            answer = Join(index=CONTROL, connections=count, terms=ours.agreed(join.terms), session=session_id)
            answer.send(control)
            self._wait_for(session, count, deadline)
            if set(session.connections) != set(range(1, count + 1)):
                came = sorted(session.connections)
                raise PeerGoneError(f"data connections {came} came instead of 1 to {count}")
            say_ready(control, session_id)
            owned, pidfd = pidfd, None
            data = [session.connections[index] for index in range(1, count + 1)]
            interval_s = answer.heartbeat_interval_s(self._settings)
            return CpuPipe(control, data, self._settings, pidfd=owned, heartbeat_interval_s=interval_s)
        except BaseException:
            with self._joining:
                session.complete = True
            for connection in session.connections.values():
                connection.close()
            raise
        finally:
            with self._joining:
                self._sessions.pop(session_id, None)
            if pidfd is not None:
                os.close(pidfd)

    def _wait_for(self, session: _Session, count: int, deadline: Deadline) -> None:
        with self._joining:
            while len(session.connections) < count:
                if self._ends:
                    raise ClosedError("the listener was closed")
                if session.shortage is not None:
                    raise session.shortage
                if not self._arrived.wait(deadline.remaining()) and deadline.expired:
                    came = len(session.connections)
                    raise TimeoutError(f"{came} of {count} data connections came in time")
            session.complete = True
