"""The listening end: proven connections come in, and each becomes a pipe beside the others."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque

from kvplug import (
    DEFAULT_TIMEOUT,
    ClosedError,
    Connection,
    Deadline,
    KvplugError,
    Listener,
    Pipe,
    PipeListener,
    Timeout,
    TimeoutError,
    close_after_fork,
    local_domain,
)
from kvplug_shm.pipe import joining
from kvplug_shm.pipe.contact import Contact
from kvplug_shm.pipe.pipe import ShmPipe, Tuning

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0
"""How long a peer may take to become the other end of a pipe, once it has proved itself."""


class ShmListener(PipeListener):
    """Owns its listener. One thread takes connections; a short-lived one makes each of them a pipe."""

    def __init__(self, listener: Listener, tuning: Tuning) -> None:
        self._listener = listener
        self._tuning = tuning
        self._contact = str(Contact(local_domain(), listener.contact))
        self._changed = threading.Condition()
        self._closed = False
        self._joining: set[Connection] = set()
        self._ready: deque[ShmPipe] = deque()
        close_after_fork(self)
        self._thread = threading.Thread(target=self._take, name="kvplug-shm-listen", daemon=True)
        self._thread.start()

    @property
    def contact(self) -> str:
        return self._contact

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._tuning.timeout_s)
        if self._closed:
            raise ClosedError("the listener of the pipe 'shm' is closed")
        with self._changed:
            while not self._ready:
                if self._closed:
                    raise ClosedError("the listener of the pipe 'shm' is closed")
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    raise TimeoutError(f"nobody connected a pipe to {self._listener.address} in time")
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
        self._listener.close()
        for connection in joining:
            with contextlib.suppress(OSError):  # it has gone, or was closed by the thread that joins
                connection.sock.shutdown(socket.SHUT_RDWR)
        for pipe in unclaimed:
            pipe.abort()
        self._thread.join(1.0)

    def __enter__(self) -> ShmListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork_in_child(self) -> None:
        # The core's listener and the pipes close themselves.
        self._closed = True
        self._changed = threading.Condition()  # somebody in the parent may have been inside
        for connection in list(self._joining):
            connection.close()

    def _take(self) -> None:
        while True:
            try:
                connection = self._listener.accept(None)
            except ClosedError:
                return
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                self._joining.add(connection)
            thread = threading.Thread(
                target=self._admit, args=(connection,), name="kvplug-shm-join", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as e:  # no more threads just now; those who come later may be luckier
                logger.warning("a connection from %s was dropped: %s", connection.describe, e)
                self._forget(connection)
                connection.close()

    def _admit(self, connection: Connection) -> None:
        try:
            pipe = joining.accept(connection, self._tuning, Deadline.after(_JOIN_TIMEOUT_S))
        except Exception as e:
            # Nobody here waits for this pipe; the connecting end sees the hang-up and says so there.
            foreign = not isinstance(e, KvplugError | OSError)  # out of threads, or a fault of ours
            logger.warning("a pipe from %s was not completed: %s", connection.describe, e, exc_info=foreign)
            self._forget(connection)
            return
        with self._changed:
            self._joining.discard(connection)
            closed = self._closed
            if not closed:
                self._ready.append(pipe)
                self._changed.notify_all()
        if closed:
            pipe.abort()

    def _forget(self, connection: Connection) -> None:
        with self._changed:
            self._joining.discard(connection)
