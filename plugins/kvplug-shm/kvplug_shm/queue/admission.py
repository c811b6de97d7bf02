"""Admission of readers on this host: they join the writer, and the writer notices when one has ended."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

from kvplug import ClosedError, KvplugError, ResourceExhaustedError
from kvplug.transport import Acceptor, Connection, Credentials, Deadline, Listener, Watch, close_after_fork
from kvplug_shm.queue import join
from kvplug_shm.queue.join import PURPOSE, hang_up
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_shm.queue.ring_buffer import Sizes

_DECLINE_S: Final = 0.1
_JOIN_TIMEOUT_S: Final = 10.0
"""How long a proven reader may take to send its request."""
_OTHER_JOIN_S: Final = 1.0
"""How long a reader waits for the end of another join of its rank before it is refused."""


class Admission:
    """Serves each connection concurrently until its reader has joined, and watches it from then on."""

    def __init__(
        self,
        reader_table: ReaderTable,
        sizes: Sizes,
        fd: int,
        credentials: Credentials,
        heartbeat_timeout_s: float,
    ) -> None:
        """Takes ownership of ``fd``, the ring's memory, also if it raises.

        Raises:
            TransportError, ResourceExhaustedError: the listener or the thread cannot be created.
        """
        self._reader_table = reader_table
        self._sizes = sizes
        self._fd = fd
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lock = threading.RLock()  # a signal handler may close it
        self._closed = False
        self._joined: dict[int, tuple[Connection, Watch]] = {}
        self._handed_over: set[int] = set()
        """Descriptors that are being handed over to readers."""
        try:
            self._listener = Listener.open("unix:", credentials, PURPOSE)
        except BaseException:
            os.close(fd)
            raise
        close_after_fork(self)
        try:
            self._acceptor: Acceptor[None] = Acceptor(
                [self._listener],
                self._admit,
                what="the join of a queue's reader",
                name="kvplug-shm-queue",
                lost=_decline,
            )
        except BaseException:
            self._close_memory()
            self._reader_table.close()
            raise

    @property
    def contact(self) -> str:
        return self._listener.contact

    def close(self) -> None:
        """Admit no more readers, and close the connection of every one that has joined. Idempotent."""
        with self._lock:
            self._closed = True
            joined = list(self._joined.values())
            self._close_memory()
        self._reader_table.close()
        for connection, watch in joined:
            watch.close()
            hang_up(connection)
        self._acceptor.close()
        with self._lock:
            self._joined.clear()  # not earlier: after an interrupt this is called again

    def _after_fork_in_child(self) -> None:
        # The acceptor and the connections close themselves.
        self._closed = True
        for fd in self._handed_over:
            os.close(fd)
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
            asked = join.asked(connection, self._heartbeat_timeout_s, pidfd is not None, deadline)
            self._reader_table.wait_join_ended(asked.rank, _OTHER_JOIN_S)
            why = self._reader_table.admit(asked.rank, str(connection.peer), joining=True)
            if why:
                join.refuse(connection, why, deadline)
                connection.close()
                return
            rank = asked.rank
            index = self._reader_table.index_of(rank)
            with self._lock:
                if self._closed:
                    raise ClosedError("the queue was closed")
                fd = os.dup(self._fd)
                self._handed_over.add(fd)
            on_gone = join.LateCall()
            watch: Watch | None = None
            try:
                if asked.quiet:  # before the reader counts on it; heartbeats begin after the last message
                    owned, pidfd = pidfd, None
                    watch = join.watched(connection, owned, None, on_gone)
                join.hand_over(connection, asked, index, self._sizes, fd, deadline)
                join.welcome(connection, deadline)
            except BaseException:
                if watch is not None:
                    watch.close()
                raise
            finally:
                self._handed_over.discard(fd)
                os.close(fd)
            welcomed = True
            if watch is None:
                owned, pidfd = pidfd, None
                watch = join.watched(connection, owned, asked.heartbeat_s, on_gone)
            self._note(connection, rank, watch, on_gone)
        except Exception as e:
            if rank is None:
                raise
            if not welcomed:
                self._reader_table.dismiss(rank)
                raise
            self._reader_table.evict(rank, f"it could not be watched: {e}", died=True)
            connection.close()
        finally:
            if pidfd is not None:
                os.close(pidfd)
            with self._lock:
                if self._reader_table.all_came:
                    self._close_memory()  # no other reader needs it

    def _note(self, connection: Connection, rank: int, watch: Watch, on_gone: join.LateCall) -> None:
        """The connection is a reader's from here on."""

        def end(reason: str) -> None:
            self._reader_table.hung_up(rank, reason)
            with self._lock:
                self._joined.pop(rank, None)
            hang_up(connection)

        on_gone.be(end)
        with self._lock:
            closed = self._closed
            if not closed and watch.reason is None:
                self._joined[rank] = (connection, watch)
        self._reader_table.joined(rank)  # not with the lock: a signal handler may close the queue there
        if closed:
            watch.close()
            hang_up(connection)


def _decline(connection: Connection, shortage: ResourceExhaustedError) -> None:
    """Tell a reader why it is not admitted. It is a few bytes, into a connection that carries nothing yet."""
    with contextlib.suppress(KvplugError):
        join.decline(connection, shortage, Deadline.after(_DECLINE_S))
