"""The listening end: proven connections come in, and are joined to pipes side by side."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections import deque

import attrs

from kvplug import (
    DEFAULT_TIMEOUT,
    ClosedError,
    Connection,
    Deadline,
    KvplugError,
    Listener,
    PeerGoneError,
    Pipe,
    PipeListener,
    Timeout,
    TimeoutError,
    close_after_fork,
    local_domain,
)
from kvplug_cpu.contact import Contact
from kvplug_cpu.joining import CONTROL, Join, milliseconds, say_ready
from kvplug_cpu.pipe import CpuPipe, Tuning

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0
"""How long the parts of one pipe may take to arrive, once the first has proved itself."""


@attrs.define(eq=False)
class _Session:
    """A pipe in the making."""

    lanes: dict[int, Connection] = attrs.field(factory=dict)


class CpuListener(PipeListener):
    """Owns its listeners. One thread for each takes connections; a short-lived one joins each pipe."""

    def __init__(self, listeners: list[Listener], *, lanes: int, tuning: Tuning) -> None:
        self._listeners = listeners
        self._lanes = lanes
        self._tuning = tuning
        self._contact = str(Contact(local_domain(), tuple(listener.contact for listener in listeners)))
        self._changed = threading.Condition()
        self._closed = False
        self._sessions: dict[bytes, _Session] = {}
        self._joining: set[Connection] = set()
        self._ready: deque[CpuPipe] = deque()
        close_after_fork(self)
        self._threads = [
            threading.Thread(target=self._take, args=(each,), name="kvplug-cpu-listen", daemon=True)
            for each in listeners
        ]
        for thread in self._threads:
            thread.start()

    @property
    def contact(self) -> str:
        return self._contact

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._tuning.timeout_s)
        if self._closed:
            raise ClosedError("the listener of the pipe 'cpu' is closed")
        with self._changed:
            while not self._ready:
                if self._closed:
                    raise ClosedError("the listener of the pipe 'cpu' is closed")
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    where = ", ".join(listener.address for listener in self._listeners)
                    raise TimeoutError(f"nobody connected a pipe to {where} in time")
            return self._ready.popleft()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            joining = list(self._joining)
            unclaimed = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        for listener in self._listeners:
            listener.close()
        for connection in joining:
            _hang_up(connection)
        for pipe in unclaimed:
            pipe.abort()
        for thread in self._threads:
            thread.join(1.0)

    def __enter__(self) -> CpuListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork_in_child(self) -> None:
        # The core's listeners and the pipes close themselves.
        self._closed = True
        self._changed = threading.Condition()  # somebody in the parent may have been inside
        for connection in list(self._joining):
            connection.close()

    def _take(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept(None)
            except ClosedError:
                return
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                self._joining.add(connection)
            thread = threading.Thread(
                target=self._admit, args=(connection,), name="kvplug-cpu-join", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as e:  # no more threads just now; those who come later may be luckier
                logger.warning("a connection from %s was dropped: %s", connection.describe, e)
                self._forget(connection)
                connection.close()

    def _admit(self, connection: Connection) -> None:
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        try:
            join = Join.receive(connection, deadline)
            if join.index == CONTROL:
                self._gather(connection, join, deadline)
            else:
                self._hand_over(connection, join)
        except Exception as e:
            # Nobody here waits for this pipe; the connecting end sees the hang-up and says so there.
            foreign = not isinstance(e, KvplugError | OSError)  # out of threads, or a fault of ours
            logger.warning("a pipe from %s was not completed: %s", connection.describe, e, exc_info=foreign)
            self._forget(connection)
            connection.close()

    def _hand_over(self, lane: Connection, join: Join) -> None:
        with self._changed:
            session = self._sessions.get(join.session)
            if session is None or join.index in session.lanes:
                raise PeerGoneError("it belongs to no pipe that is being joined")
            session.lanes[join.index] = lane
            self._changed.notify_all()

    def _gather(self, control: Connection, join: Join, deadline: Deadline) -> None:
        count = max(1, min(join.lanes, self._lanes))
        session_id, session = secrets.token_bytes(16), _Session()
        pidfd = control.peer.open_pidfd()
        try:
            quiet = join.sees_death and pidfd is not None
            with self._changed:
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
            with self._changed:
                while len(session.lanes) < count:
                    if self._closed:
                        raise ClosedError("the listener was closed")
                    if not self._changed.wait(deadline.remaining()) and deadline.expired:
                        raise TimeoutError(f"{len(session.lanes)} of {count} lanes came in time")
                del self._sessions[session_id]
            if set(session.lanes) != set(range(1, count + 1)):
                raise PeerGoneError(f"lanes {sorted(session.lanes)} came instead of 1 to {count}")
            say_ready(control, session_id)
            owned, pidfd = pidfd, None
            lanes = [session.lanes[index] for index in range(1, count + 1)]
            interval_s = answer.heartbeat_interval_s(self._tuning)
            pipe = CpuPipe(control, lanes, self._tuning, pidfd=owned, heartbeat_interval_s=interval_s)
        except BaseException:
            with self._changed:
                self._sessions.pop(session_id, None)
            for lane in session.lanes.values():
                self._forget(lane)
                lane.close()
            raise
        finally:
            if pidfd is not None:
                os.close(pidfd)
        with self._changed:
            self._joining.difference_update((control, *lanes))
            closed = self._closed
            if not closed:
                self._ready.append(pipe)
                self._changed.notify_all()
        if closed:
            pipe.abort()

    def _forget(self, connection: Connection) -> None:
        with self._changed:
            self._joining.discard(connection)


def _hang_up(connection: Connection) -> None:
    try:
        connection.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has gone, or was closed by the thread that joins
