"""Admission of readers: they join the writer, and the writer notices when one has ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from typing import Final

from kvplug import ClosedError
from kvplug.transport import (
    Acceptor,
    Connection,
    Credentials,
    Deadline,
    DescriptorGuard,
    Listener,
    Watch,
    close_after_fork,
)
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.queue import join
from kvplug_shm.queue.join import PURPOSE, hang_up
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_shm.queue.remote_readers import Link, RemoteReaders
from kvplug_shm.queue.ring_buffer import Sizes

_JOIN_TIMEOUT_S: Final = 10.0
"""How long a proven reader may take to send its request."""
_OTHER_JOIN_S: Final = 1.0
"""How long a reader waits for the end of another join of its rank before it is refused."""
_MAX_JOINING: Final = 256


class Admission:
    """Serves each connection concurrently until its reader has joined. From then on a reader that shares the
    memory is watched, and a remote one is served by :class:`RemoteReaders`."""

    def __init__(
        self,
        reader_table: ReaderTable,
        sizes: Sizes,
        fd: int,
        credentials: Credentials,
        heartbeat_timeout_s: float,
        remote_address: str,
    ) -> None:
        """Takes ownership of ``fd``, the ring's memory, also if it raises.

        ``remote_address``: where to listen for remote readers; empty: there are none.

        Raises:
            InsecureAddressError: that is a TCP address, and there is neither a secret nor TLS.
            ConfigError: it is not an address of this host.
            TransportError, ResourceExhaustedError: a listener or a thread cannot be created.
        """
        self.queue = secrets.token_hex(8)
        """Distinguishes the queue from a later one at the same address."""
        self._reader_table = reader_table
        self.remote_readers = RemoteReaders(reader_table)
        self._sizes = sizes
        self._fd = fd
        self._memory = DescriptorGuard(self._close_fd, lambda: ClosedError("the queue was closed"))
        """Guards each use of ``fd``, which is open until every reader has joined or is gone."""
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lock = threading.RLock()  # a signal handler may close it
        self._closed = False
        self._joined: dict[int, tuple[Connection, Watch]] = {}
        self._listeners: list[Listener] = []
        close_after_fork(self)
        try:
            try:
                for address in ("unix:", remote_address):
                    if address:
                        self._listeners.append(Listener.open(address, credentials, PURPOSE))
            except BaseException:
                for listener in self._listeners:
                    listener.close()
                raise
            self._acceptor: Acceptor[None] = Acceptor(
                self._listeners,
                self._admit,
                what="the join of a queue's reader",
                name="kvplug-shm-queue",
                max_served=_MAX_JOINING + len(reader_table.reader_ranks),
            )
        except BaseException:
            self._memory.retire()
            self._reader_table.close()
            raise

    @property
    def contact(self) -> str:
        """For readers on this host."""
        return self._listeners[0].contact

    @property
    def remote_contact(self) -> str:
        """For remote readers; empty: there are none."""
        return self._listeners[1].contact if len(self._listeners) > 1 else ""

    def close(self) -> None:
        """Admit no more readers, and close the connection of every one that has joined. Idempotent."""
        with self._lock:
            self._closed = True
            joined = list(self._joined.values())
            self._memory.retire()
        self._reader_table.close()
        self.remote_readers.abort()
        for connection, watch in joined:
            watch.close()
            hang_up(connection)
        self._acceptor.close()
        with self._lock:
            self._joined.clear()  # not earlier: after an interrupt this is called again

    def _after_fork_in_child(self) -> None:
        # The acceptor, the connections and the memory close themselves.
        self._closed = True

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # -- the threads of the acceptor -----------------------------------------------------------

    def _admit(self, connection: Connection) -> None:
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        with contextlib.closing(JoiningPeer(connection, self._heartbeat_timeout_s, deadline)) as reader:
            queue, rank = join.asked(reader)
            if queue != self.queue:
                join.answer_gone(reader)
                connection.close()
                return
            self._reader_table.wait_join_ended(rank, _OTHER_JOIN_S)
            why = self._reader_table.admit(rank, str(connection.peer))
            if why:
                join.refuse(reader, why)
                connection.close()
                return
            link: Link | None = None
            try:
                if connection.address == self.remote_contact:
                    link = self._admit_remote(reader, rank)
                else:
                    self._admit_local(reader, rank)
            finally:
                if self._reader_table.all_came:
                    self._memory.retire()  # no other reader needs it
        if link is not None:
            self.remote_readers.serve(link)

    def _admit_remote(self, reader: JoiningPeer, rank: int) -> Link:
        try:
            link = self.remote_readers.prepare(rank, reader)
            try:
                join.admit(reader, self._reader_table.index_of(rank), self._sizes)
            except BaseException:
                self.remote_readers.cancel(link)
                raise
        except BaseException:
            self._reader_table.dismiss(rank)
            raise
        self._reader_table.joined(rank)
        return link

    def _admit_local(self, reader: JoiningPeer, rank: int) -> None:
        connection, is_welcome = reader.connection, False

        def end(reason: str) -> None:
            with self._lock:
                if self._joined.pop(rank, None) is None:
                    return  # it is joining, and the reason is checked afterwards; or this end was closed
            self._reader_table.evict(rank, reason)
            hang_up(connection)

        def admit() -> None:
            nonlocal is_welcome
            with self._memory:
                join.admit(reader, self._reader_table.index_of(rank), self._sizes, [self._fd])
            is_welcome = True

        try:
            watch = reader.watch_from(admit, end)
        except Exception as e:
            if not is_welcome:
                self._reader_table.dismiss(rank)
                raise
            self._reader_table.evict(rank, f"it could not be watched: {e}")
            connection.close()
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._joined[rank] = (connection, watch)
        self._reader_table.joined(rank)  # not with the lock: a signal handler may close the queue there
        if closed:
            watch.close()
            hang_up(connection)
        elif watch.reason is not None:
            end(watch.reason)
