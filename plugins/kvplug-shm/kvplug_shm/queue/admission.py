"""The writer's door: readers of this host come in, and whoever ends afterwards is noticed."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from kvplug import (
    ClosedError,
    Connection,
    Credentials,
    Deadline,
    KvplugError,
    Listener,
    TransportError,
    Watch,
    close_after_fork,
)
from kvplug_shm.queue import joining
from kvplug_shm.queue.joining import PURPOSE, hang_up
from kvplug_shm.queue.ring_buffer import Sizes
from kvplug_shm.queue.roster import Roster

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S: Final = 10.0
"""How long a reader that has proved itself may take to say what it wants."""


class Admission:
    """One thread takes connections; a short-lived one serves each until the reader has joined."""

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
            TransportError: there can be no listener.
        """
        self._roster = roster
        self._sizes = sizes
        self._fd = fd
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lock = threading.RLock()  # a signal's handler may close it
        self._closed = False
        self._joining: set[Connection] = set()
        self._joined: dict[int, tuple[Connection, Watch]] = {}
        try:
            self._listener = Listener.open("unix:", credentials, PURPOSE)
        except BaseException:
            os.close(fd)
            raise
        close_after_fork(self)
        thread = threading.Thread(target=self._take, name="kvplug-shm-queue", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:
            self.close()
            raise TransportError(f"a queue needs a thread that admits its readers: {e}") from e

    @property
    def contact(self) -> str:
        return self._listener.contact

    def close(self) -> None:
        """Nobody comes in any more, and those who are in find that the writer has hung up. Idempotent."""
        with self._lock:
            self._closed = True
            joining = list(self._joining)
            joined = list(self._joined.values())
            self._close_memory()
        self._roster.close()
        for connection, watch in joined:
            watch.close()
            hang_up(connection)
        for connection in joining:
            hang_up(connection)
        self._listener.close()
        with self._lock:
            self._joined.clear()  # not before: who interrupts this calls it once more

    def _after_fork_in_child(self) -> None:
        # The core's listener closes itself.
        self._closed = True
        self._lock = threading.RLock()  # somebody in the parent may have held it
        for connection in (*self._joining, *(joined for joined, _ in self._joined.values())):
            connection.close()
        self._close_memory()

    def _close_memory(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _close_memory_if_needless(self) -> None:
        """Under the lock."""
        if self._roster.all_came:
            self._close_memory()

    def _take(self) -> None:
        while True:
            try:
                connection = self._listener.accept(None)
            except ClosedError:
                return
            with self._lock:
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
                logger.warning("a reader of a queue, %s, was dropped: %s", connection.describe, e)
                self._drop(connection)

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
                self._drop(connection)
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
            # Nobody here waits for this reader; it sees the hang-up and says so there.
            if rank is not None and welcomed:
                self._roster.evict(rank, f"nobody could look after it: {e}", died=True)
            else:
                foreign = not isinstance(e, KvplugError | OSError)  # out of threads, or a fault of ours
                logger.warning(
                    "a reader of a queue, %s, has not joined: %s", connection.describe, e, exc_info=foreign
                )
                if rank is not None:
                    self._roster.dismiss(rank)
            self._drop(connection)
        finally:
            if pidfd is not None:
                os.close(pidfd)

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
            self._joining.discard(connection)
            closed = self._closed
            if not closed and watch.reason is None:
                self._joined[rank] = (connection, watch)
            self._roster.joined(rank)
            self._close_memory_if_needless()
        if closed:
            watch.close()
            hang_up(connection)

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._joining.discard(connection)
            self._close_memory_if_needless()
        connection.close()
