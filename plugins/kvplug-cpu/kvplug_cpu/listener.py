"""The listening end: connections are joined to pipes, several to each."""

from __future__ import annotations

import os
import secrets
import threading

import attrs

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.transport import Connection, Deadline, Listener, Pipe, PipeAcceptor, local_domain
from kvplug_cpu.contact import Contact
from kvplug_cpu.joining import CONTROL, Join, milliseconds, say_ready
from kvplug_cpu.pipe import CpuPipe, Tuning

_JOIN_TIMEOUT_S = 10.0
"""How long the parts of one pipe may take to arrive, once the first has proved itself."""


@attrs.define(eq=False)
class _Session:
    """A pipe in the making."""

    lanes: dict[int, Connection] = attrs.field(factory=dict)
    """Its own until it is a pipe."""
    complete: bool = False


class CpuListener(PipeAcceptor):
    """Owns its listeners."""

    def __init__(self, listeners: list[Listener], *, lanes: int, tuning: Tuning) -> None:
        self._lanes = lanes
        self._tuning = tuning
        self._arrived = threading.Condition()
        self._sessions: dict[bytes, _Session] = {}
        contact = str(Contact(local_domain(), tuple(listener.contact for listener in listeners)))
        super().__init__(listeners, transport="cpu", contact=contact, timeout_s=tuning.timeout_s)

    def close(self) -> None:
        super().close()
        with self._arrived:
            self._arrived.notify_all()

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        self._arrived = threading.Condition()  # somebody in the parent may have been inside
        for session in list(self._sessions.values()):
            for lane in list(session.lanes.values()):
                lane.close()

    def _join(self, connection: Connection) -> Pipe | None:
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        join = Join.receive(connection, deadline)
        if join.index == CONTROL:
            return self._gather(connection, join, deadline)
        self._hand_over(connection, join)
        return None

    def _hand_over(self, lane: Connection, join: Join) -> None:
        with self._arrived:
            session = self._sessions.get(join.session)
            if session is None or session.complete or join.index in session.lanes:
                raise PeerGoneError("it belongs to no pipe that is being joined")
            session.lanes[join.index] = lane
            self._arrived.notify_all()

    def _gather(self, control: Connection, join: Join, deadline: Deadline) -> CpuPipe:
        count = max(1, min(join.lanes, self._lanes))
        session_id, session = secrets.token_bytes(16), _Session()
        pidfd = control.peer.open_pidfd()
        try:
            quiet = join.sees_death and pidfd is not None
            with self._arrived:
                self._sessions[session_id] = session
            patience_ms = milliseconds(self._tuning.heartbeat_timeout_s)
            answer = Join(
                index=CONTROL,
                lanes=count,
                sees_death=quiet,
                heartbeat_ms=min(join.heartbeat_ms, patience_ms),
                session=session_id,
            )
            answer.send(control)
            self._wait_for(session, count, deadline)
            if set(session.lanes) != set(range(1, count + 1)):
                raise PeerGoneError(f"lanes {sorted(session.lanes)} came instead of 1 to {count}")
            say_ready(control, session_id)
            owned, pidfd = pidfd, None
            lanes = [session.lanes[index] for index in range(1, count + 1)]
            interval_s = answer.heartbeat_interval_s(self._tuning)
            return CpuPipe(control, lanes, self._tuning, pidfd=owned, heartbeat_interval_s=interval_s)
        except BaseException:
            with self._arrived:
                session.complete = True
            for lane in session.lanes.values():
                lane.close()
            raise
        finally:
            with self._arrived:
                self._sessions.pop(session_id, None)
            if pidfd is not None:
                os.close(pidfd)

    def _wait_for(self, session: _Session, count: int, deadline: Deadline) -> None:
        with self._arrived:
            while len(session.lanes) < count:
                if self.closed:
                    raise ClosedError("the listener was closed")
                if not self._arrived.wait(deadline.remaining()) and deadline.expired:
                    raise TimeoutError(f"{len(session.lanes)} of {count} lanes came in time")
            session.complete = True
