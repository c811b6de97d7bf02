"""The factory of the pipe "cpu": where to listen, and how several proven connections become one pipe.

The connecting end opens a control connection and requests a number of data connections; the listening end
answers with a random session id and the number of both. Each data connection then presents the id, after its
own proof. When all have arrived, the listening end confirms it on the control connection. Every message is
one fixed struct.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
import time
from typing import Final

import attrs

from kvplug import (
    ClosedError,
    ConfigError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug.transport import (
    Acceptor,
    Address,
    Connection,
    Deadline,
    DuplexEndpoint,
    Listener,
    Pipe,
    PipeEndpoint,
    PipeListener,
    Watch,
    WireError,
)
from kvplug_cpu.options import CpuOptions
from kvplug_cpu.pipe import CpuPipe

CONTROL: Final = 0
"""The index of the control connection; data connections count from 1."""
_READY = 255
_MAGIC = b"KVJ1"
_STRUCT = struct.Struct("<4sBBBxI16s")
_SEES_DEATH = 1
_SHORTEST_BEAT_S = 0.001
_UNUSED = Watch.Terms(True, 0)
_JOIN_TIMEOUT_S = 10.0
"""How long the connections of one pipe may take to arrive, once the first has proved itself."""
_SEND_S = 10.0
"""One message fits into any socket's buffer, so sending never waits."""


@attrs.frozen(kw_only=True)
class Join:
    """The message of both ends while they join connections."""

    index: int
    connections: int
    """The number of data connections."""
    terms: Watch.Terms = _UNUSED
    """The sender's own; answered: what was agreed."""
    session: bytes = b"\0" * 16

    def send(self, connection: Connection) -> None:
        """Raises PeerGoneError."""
        flags = _SEES_DEATH if self.terms.sees_death else 0
        data = _STRUCT.pack(
            _MAGIC, self.index, self.connections, flags, self.terms.heartbeat_ms, self.session
        )
        connection.send(data, Deadline.after(_SEND_S))

    @classmethod
    def receive(cls, connection: Connection, deadline: Deadline) -> Join:
        """Raises TimeoutError, PeerGoneError, WireError."""
        data = connection.receive(_STRUCT.size, deadline)
        magic, index, connections, flags, heartbeat_ms, session = _STRUCT.unpack(data)
        if magic != _MAGIC:
            raise WireError(f"{connection.describe} does not join connections as this version does")
        return cls(
            index=index,
            connections=connections,
            terms=Watch.Terms(bool(flags & _SEES_DEATH), heartbeat_ms),
            session=session,
        )

    def heartbeat_interval_s(self, settings: CpuPipe.Settings) -> float | None:
        """Seconds between heartbeats of both ends, as agreed; ``None``: no heartbeats."""
        return self.terms.interval_s(settings.heartbeat_timeout_s, at_least_s=_SHORTEST_BEAT_S)


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


class CpuListener(Acceptor[Pipe], PipeListener):
    """The listening end: connections are joined to pipes, several to each. Owns its listeners."""

    def __init__(
        self, listeners: list[Listener], contact: str, max_connections: int, settings: CpuPipe.Settings
    ) -> None:
        self._max_connections = max_connections
        self._settings = settings
        self._joining = threading.RLock()
        self._arrived = threading.Condition(self._joining)
        self._sessions: dict[bytes, _Session] = {}
        self._ends = False
        super().__init__(
            listeners,
            self._join,
            what="the pipe 'cpu'",
            name="kvplug-cpu",
            contact=contact,
            discard=lambda pipe: pipe.abort(),
            timeout_s=settings.timeout_s,
            lost=self._note_shortage,
        )

    def close(self) -> None:
        with self._joining:
            self._ends = True
            self._arrived.notify_all()
        super().close()

    def _join(self, connection: Connection) -> Pipe | None:
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        join = Join.receive(connection, deadline)
        if join.index == CONTROL:
            return self._gather(connection, join, deadline)
        self._hand_over(connection, join)
        return None

    def _note_shortage(self, connection: Connection, shortage: ResourceExhaustedError) -> None:
        connection.decline(shortage)
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
            ours = Watch.Terms.of(self._settings.heartbeat_timeout_s, sees_death=pidfd is not None)
            with self._joining:
                self._sessions[session_id] = session
            answer = Join(index=CONTROL, connections=count, terms=ours.agreed(join.terms), session=session_id)
            answer.send(control)
            self._wait_for(session, count, deadline)
            if set(session.connections) != set(range(1, count + 1)):
                came = sorted(session.connections)
                raise PeerGoneError(f"data connections {came} came instead of 1 to {count}")
            # Before the pipe is made: heartbeats may follow on the same connection.
            Join(index=_READY, connections=0, session=session_id).send(control)
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


class CpuContact(DuplexEndpoint.Contact):
    """``cpu1 <domain> <address> [<address> ...]``."""

    TRANSPORT = "cpu"
    MAX_ADDRESSES = 4
    UNREACHABLE = (
        "the peer listens on an abstract Unix socket of another host or network namespace; set its"
        " option socket to 'tcp' and its host to an address that can be reached from here"
    )


class CpuEndpoint(DuplexEndpoint):
    """Listens on an abstract Unix socket, on TCP, or on both, depending on options and host."""

    CONTACT = CpuContact
    PURPOSE = "pipe-cpu"

    def __init__(self, context: PipeEndpoint.Context) -> None:
        if context.device.partition(":")[0] != "cpu":
            raise ConfigError(f"the pipe 'cpu' moves CPU tensors, and the device is {context.device!r}")
        super().__init__(context)
        self._options: CpuOptions = context.options if context.options is not None else CpuOptions()
        self._settings = CpuPipe.Settings.of(
            context,
            max_in_flight_bytes=self._options.max_in_flight_bytes,
            split_bytes=self._options.split_bytes,
            socket_buffer_bytes=self._options.socket_buffer_bytes,
        )

    def _addresses(self) -> list[str]:
        """The faster address first. Off loopback both: a peer on this host still uses the faster one."""
        host, kind = self._context.host, self._options.socket
        if host.startswith("unix:"):
            if kind == "tcp":
                raise ConfigError(f"the host {host!r} is a Unix socket, and the option socket is 'tcp'")
            return [Address.beside(host)]
        tcp = str(Address(host))
        if kind == "auto":
            return ["unix:"] if Address(host).is_loopback else ["unix:", tcp]
        return ["unix:"] if kind == "unix" else [tcp]

    def _listener(self, listeners: list[Listener], contact: str) -> PipeListener:
        return CpuListener(listeners, contact, self._options.connections, self._settings)

    def _connect(self, address: str, deadline: Deadline) -> Pipe:
        """Open a pipe of as many data connections as both ends allow."""
        count = self._options.connections
        opened: list[Connection] = []
        pidfd: int | None = None
        try:
            control = self._dial(address, deadline)
            opened.append(control)
            pidfd = control.peer.open_pidfd()
            ours = Watch.Terms.of(self._settings.heartbeat_timeout_s, sees_death=pidfd is not None)
            Join(index=CONTROL, connections=count, terms=ours).send(control)
            answer = Join.receive(control, deadline)
            agreed = answer.connections
            if not 1 <= agreed <= count:
                raise WireError(f"{control.describe} wants {agreed} data connections; {count} were offered")
            for index in range(1, agreed + 1):
                data = self._dial(address, deadline)
                opened.append(data)
                Join(index=index, connections=agreed, session=answer.session).send(data)
            if Join.receive(control, deadline).index != _READY:
                raise TransportError(f"{control.describe} did not confirm the pipe")
            owned, pidfd = pidfd, None
            interval_s = answer.heartbeat_interval_s(self._settings)
            return CpuPipe(control, opened[1:], self._settings, pidfd=owned, heartbeat_interval_s=interval_s)
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            for connection in opened:
                connection.close()
            raise
