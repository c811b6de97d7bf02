"""Admission of readers: they join the writer, and the writer notices when one has ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from typing import Final

from kvplug import ClosedError, KvplugError, ResourceExhaustedError
from kvplug.transport import Acceptor, Connection, Credentials, Deadline, Listener, Watch, close_after_fork
from kvplug_shm.queue import join
from kvplug_shm.queue.join import PURPOSE, hang_up
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_shm.queue.remote_readers import RemoteReaders
from kvplug_shm.queue.ring_buffer import Sizes

_DECLINE_S: Final = 0.1
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
            ConfigError: it is no address of this host.
            TransportError, ResourceExhaustedError: a listener or a thread cannot be created.
        """
        self.queue = secrets.token_hex(8)
        """Distinguishes the queue from a later one at the same address."""
        self._reader_table = reader_table
        self.remote_readers = RemoteReaders(reader_table)
        self._sizes = sizes
        self._fd = fd
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lock = threading.RLock()  # a signal handler may close it
        self._closed = False
        self._joined: dict[int, tuple[Connection, Watch]] = {}
        self._handed_over: set[int] = set()
        """Descriptors that are being handed over to readers."""
        self._listeners: list[Listener] = []
        try:
            for address in ("unix:", remote_address):
                if address:
                    self._listeners.append(Listener.open(address, credentials, PURPOSE))
        except BaseException:
            for listener in self._listeners:
                listener.close()
            os.close(fd)
            raise
        close_after_fork(self)
        try:
            self._acceptor: Acceptor[None] = Acceptor(
                self._listeners,
                self._admit,
                what="the join of a queue's reader",
                name="kvplug-shm-queue",
                max_served=_MAX_JOINING + len(reader_table.reader_ranks),
                lost=_decline,
            )
        except BaseException:
            self._close_memory()
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
            self._close_memory()
        self._reader_table.close()
        self.remote_readers.abort()
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

    # -- the threads of the acceptor -----------------------------------------------------------

    def _admit(self, connection: Connection) -> None:
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        with contextlib.closing(join.asked(connection, self._heartbeat_timeout_s, deadline)) as reader:
            if reader.queue != self.queue:
                join.miss(connection, deadline)
                connection.close()
                return
            self._reader_table.wait_join_ended(reader.rank, _OTHER_JOIN_S)
            why = self._reader_table.admit(reader.rank, str(connection.peer))
            if why:
                join.refuse(connection, why, deadline)
                connection.close()
                return
            try:
                if connection.address == self.remote_contact:
                    self._admit_remote(connection, reader, deadline)
                else:
                    self._admit_local(connection, reader, deadline)
            finally:
                with self._lock:
                    if self._reader_table.all_came:
                        self._close_memory()  # no other reader needs it

    def _admit_remote(self, connection: Connection, reader: join.Asked, deadline: Deadline) -> None:
        rank, remote_readers = reader.rank, self.remote_readers
        try:
            link = remote_readers.prepare(rank, connection, reader.take_pidfd(), reader.silence_s)
            try:
                index = self._reader_table.index_of(rank)
                join.admit(connection, reader, index, self._sizes, (), deadline)
                join.welcome(connection, deadline)
            except BaseException:
                remote_readers.cancel(link)
                raise
        except BaseException:
            self._reader_table.dismiss(rank)
            raise
        self._reader_table.joined(rank)
        with self._lock:
            if self._reader_table.all_came:
                self._close_memory()
        remote_readers.serve(link)

    def _admit_local(self, connection: Connection, reader: join.Asked, deadline: Deadline) -> None:
        rank, on_gone = reader.rank, join.LateCall()
        watch: Watch | None = None
        welcomed = False
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError("the queue was closed")
                fd = os.dup(self._fd)
                self._handed_over.add(fd)
            try:
                if reader.silence_s is None:  # before the reader counts on it
                    watch = reader.watch(connection, on_gone)
                index = self._reader_table.index_of(rank)
                join.admit(connection, reader, index, self._sizes, [fd], deadline)
                join.welcome(connection, deadline)
            finally:
                self._handed_over.discard(fd)
                os.close(fd)
            welcomed = True
            if watch is None:  # heartbeats begin after the last message
                watch = reader.watch(connection, on_gone)
        except Exception as e:
            if watch is not None:
                watch.close()
            if not welcomed:
                self._reader_table.dismiss(rank)
                raise
            self._reader_table.evict(rank, f"it could not be watched: {e}", died=True)
            connection.close()
            return
        self._note(connection, rank, watch, on_gone)

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
