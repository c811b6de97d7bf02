"""The writer's door: readers of this host come in, and whoever ends afterwards is noticed."""

from __future__ import annotations

import os
import threading
from typing import Final

from kvplug import ClosedError
from kvplug.transport import Acceptor, Connection, Credentials, Deadline, Listener, Watch, close_after_fork
from kvplug_shm.queue import joining
from kvplug_shm.queue.joining import PURPOSE, hang_up
from kvplug_shm.queue.ring_buffer import Sizes
from kvplug_shm.queue.roster import Roster

_JOIN_TIMEOUT_S: Final = 10.0
"""How long a reader that has proved itself may take to say what it wants."""


class Admission:
    """Serves each connection beside the others until its reader has joined, and looks after it then."""

    def __init__(
        self,
        roster: Roster,
        sizes: Sizes,
        fd: int,
        credentials: Credentials,
        heartbeat_timeout_s: float,
    ) -> None:
        """Owns ``fd``, the ring's memory, from here on, also if it raises.

        Raises:
            TransportError: there can be no listener, or no thread.
        """
        self._roster = roster
        self._sizes = sizes
        self._fd = fd
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lock = threading.RLock()  # a signal's handler may close it
        self._closed = False
        self._joined: dict[int, tuple[Connection, Watch]] = {}
        try:
            self._listener = Listener.open("unix:", credentials, PURPOSE)
        except BaseException:
            os.close(fd)
            raise
        close_after_fork(self)
        try:
            self._acceptor = Acceptor(
                [self._listener],
                self._admit,
                lambda _: None,
                what="the join of a queue's reader",
                name="kvplug-shm-queue",
            )
        except BaseException:
            self._close_memory()
            self._roster.close()
            raise

    @property
    def contact(self) -> str:
        return self._listener.contact

    def close(self) -> None:
        """Nobody comes in any more, and those who are in find that the writer has hung up. Idempotent."""
        with self._lock:
            self._closed = True
            joined = list(self._joined.values())
            self._close_memory()
        self._roster.close()
        for connection, watch in joined:
            watch.close()
            hang_up(connection)
        self._acceptor.close()
        with self._lock:
            self._joined.clear()  # not before: who interrupts this calls it once more

    def _after_fork_in_child(self) -> None:
        # The acceptor closes itself.
        self._closed = True
        self._lock = threading.RLock()  # somebody in the parent may have held it
        for connection, _ in list(self._joined.values()):
            connection.close()
        self._close_memory()

    def _close_memory(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _admit(self, connection: Connection) -> None:
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        pidfd: int | None = None
        rank: int | None = None
        welcomed = False
        try:
            pidfd = connection.peer.open_pidfd()
            asked = joining.asked(connection, self._heartbeat_timeout_s, pidfd is not None, deadline)
            why = self._roster.admit(asked.rank, str(connection.peer), joining=True)
            if why:
                joining.refuse(connection, why, deadline)
                connection.close()
                return
            rank = asked.rank
            index = self._roster.index_of(rank)
            with self._lock:
                if self._closed:
                    raise ClosedError("the queue was closed")
                fd = os.dup(self._fd)
            try:
                joining.hand_over(connection, asked, index, self._sizes, fd, deadline)
            finally:
                os.close(fd)
            joining.welcome(connection, deadline)
            welcomed = True
            owned, pidfd = pidfd, None
            self._watch(connection, rank, owned, asked.heartbeat_s)
        except Exception as e:
            if rank is None:
                raise
            if not welcomed:
                self._roster.dismiss(rank)
                raise
            self._roster.evict(rank, f"nobody could look after it: {e}", died=True)
            connection.close()
        finally:
            if pidfd is not None:
                os.close(pidfd)
            with self._lock:
                if self._roster.all_came:
                    self._close_memory()  # nobody else needs it

    def _watch(
        self,
        connection: Connection,
        rank: int,
        pidfd: int | None,
        heartbeat_s: tuple[float, float] | None,
    ) -> None:
        """From here on it is a reader."""

        def on_gone(reason: str) -> None:
            self._roster.hung_up(rank, reason)
            with self._lock:
                self._joined.pop(rank, None)
            hang_up(connection)

        watch = joining.watched(connection, pidfd, heartbeat_s, on_gone)
        with self._lock:
            closed = self._closed
            if not closed and watch.reason is None:
                self._joined[rank] = (connection, watch)
        self._roster.joined(rank)  # not with the lock: whoever looks at the readers may be struck, and close
        if closed:
            watch.close()
            hang_up(connection)
