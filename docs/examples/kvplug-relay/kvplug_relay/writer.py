"""The writer's end: it admits readers, gives each message to all of them, and counts what they have taken."""

from __future__ import annotations

import array
import contextlib
import functools
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import attrs

from kvplug import CapacityError, PeerGoneError
from kvplug.net.wire import Limits, encode
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Acceptor,
    Connection,
    Deadline,
    Listener,
    MessageQueue,
    QueueEndpoint,
    Timeout,
    Watch,
)
from kvplug_relay.end import End, watch_process
from kvplug_relay.message import HEADER, JOIN, Kind, Memory, News

PURPOSE: Final = "kvplug-relay queue"
LIMITS = Limits(max_bytes=1 << 40)
_JOIN_S = 10.0
"""For so long a process that has connected may take to say which reader it is."""
_log = logging.getLogger(__name__)


@attrs.define(eq=False)
class Attached:
    """A reader, as the writer knows it."""

    rank: int
    connection: Connection | None = None
    watch: Watch | None = None
    process: str = "has not come yet"
    taken: int = 0
    """Messages that it has taken."""
    is_ready: bool = False
    gone: str = ""
    died: bool = False

    def state(self, sent: int) -> MessageQueue.ReaderState:
        return MessageQueue.ReaderState(
            rank=self.rank, process=self.process, lag=sent - self.taken, gone=self.gone, died=self.died
        )


class Writer(End):
    """The end of the writer. It looks after its readers in its calls; a thread only admits them."""

    def __init__(self, context: QueueEndpoint.Context, name: str, ranks: Sequence[int]) -> None:
        self._name = name
        self._readers = {rank: Attached(rank) for rank in ranks}
        self._sent = 0
        self._kept: deque[tuple[bytes, int]] = deque()
        """Header and descriptor of each message that a reader may still come for: all, or none."""
        self._is_ready = self._told_ready = False
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes a call that waits
        super().__init__(context, None)
        try:
            listener = Listener.open("unix:", context.credentials, PURPOSE)
            self._contact = listener.contact
            self._acceptor: Acceptor[None] = Acceptor(
                [listener],
                self._admit,
                what="a reader of a queue",
                name="kvplug-relay",
            )
        except BaseException:
            self._closed = True
            self._descriptors.retire()
            raise

    @property
    def readers(self) -> tuple[MessageQueue.ReaderState, ...]:
        self._check_open()
        with self._lock, self._descriptors:
            self._listen_to_readers()
            return tuple(each.state(self._sent) for each in self._readers.values())

    def export_handle(self) -> QueueEndpoint.Handle:
        self._check_open()
        ranks = tuple(self._readers)
        return QueueEndpoint.Handle(
            transport=self._name,
            reader_ranks=ranks,
            local_reader_ranks=ranks,
            data={"contact": self._contact},
        )

    # -- sending -------------------------------------------------------------------------------

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        with self._call():
            data = encode(value, limits=LIMITS)
            self._wait_for_room(timeout)
            self._send(Kind.VALUE, data, Memory(len(data)))

    @contextmanager
    def acquire_write(
        self, nbytes: int | None = None, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Iterator[memoryview]:
        size = self._context.max_chunk_bytes
        nbytes = size if nbytes is None else nbytes
        if not 0 <= nbytes <= size:
            raise CapacityError(f"{nbytes} bytes were asked for, and a chunk has {size}")
        with self._call():
            self._wait_for_room(timeout)
            memory = Memory(nbytes)
            try:
                with memoryview(memory.map) as whole, whole[:nbytes] as view:
                    yield view
                self._check_open()
            except BaseException:
                os.close(memory.fd)
                raise
            self._send(Kind.CHUNK, nbytes, memory)

    def _send(self, kind: Kind, content: bytes | int, memory: Memory) -> None:
        """Give it to every reader that is there, and keep it for those that are not."""
        try:
            if isinstance(content, bytes):
                memory.map[: len(content)] = content
            memory.seal()
        except BaseException:
            os.close(memory.fd)
            raise
        header = HEADER.pack(kind, content if isinstance(content, int) else len(content))
        with self._lock:
            self._sent += 1
            self._kept.append((header, memory.fd))
            for each in self._readers.values():
                self._give(each, header, memory.fd)
            self._drop_kept()

    def _give(self, reader: Attached, header: bytes, *fds: int) -> None:
        if reader.connection is None:
            return
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            reader.connection.sock.sendmsg([header], control, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionError):
            self._listen_to(reader)  # it may have said that it leaves
        except OSError as e:  # too many descriptors are under way, say
            self._evict(reader, f"a message cannot be passed to it: {e}", died=True)

    def _drop_kept(self) -> None:
        """With everybody here, the kernel holds what was sent until it is taken."""
        if all(each.connection is not None or each.gone for each in self._readers.values()):
            while self._kept:
                os.close(self._kept.popleft()[1])

    # -- waiting -------------------------------------------------------------------------------

    def _wait_for_room(self, timeout: Timeout) -> None:
        wait = self._wait("room for a message", lambda: self._named(self._slow()), self._deadline(timeout))
        self._wait_until(lambda: not self._slow(), wait)

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        wait = self._wait("all to be ready", lambda: self._named(self._unready()), self._deadline(timeout))
        with self._call():
            self._is_ready = True
            self._wait_until(lambda: not self._unready(), wait)
            with self._lock:
                if not self._told_ready:
                    self._told_ready = True
                    for each in self._readers.values():
                        self._give(each, HEADER.pack(Kind.READY, 0))

    def _wait_until(self, done: Any, wait: MessageQueue.Wait) -> None:
        while True:
            with self._lock:
                self._listen_to_readers()
                self._check_open()
                if self._readers and all(each.gone for each in self._readers.values()):
                    raise PeerGoneError(f"no reader is left: {self._named(list(self._readers.values()))}")
                if done():
                    return
                connections = [each.connection for each in self._readers.values() if each.connection]
            self._poll([self._event, *(each.fileno() for each in connections)], wait.pause())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)

    def _slow(self) -> list[Attached]:
        most = self._context.max_chunks
        return [each for each in self._readers.values() if not each.gone and self._sent - each.taken >= most]

    def _unready(self) -> list[Attached]:
        return [each for each in self._readers.values() if not each.gone and not each.is_ready]

    def _named(self, readers: list[Attached]) -> str:
        return ", ".join(str(each.state(self._sent)) for each in readers)

    # -- readers -------------------------------------------------------------------------------

    def _admit(self, connection: Connection) -> None:
        """In a thread of the acceptor, which closes the connection if this raises."""
        data = connection.receive(JOIN.size, Deadline.after(_JOIN_S))
        (rank,) = JOIN.unpack(data)
        with self._lock:
            reader = self._readers.get(rank)
            if self._closed or reader is None or reader.connection is not None or reader.gone:
                why = f"rank {rank} is no reader of this queue, or has attached already".encode()
                connection.sock.send(HEADER.pack(Kind.REFUSED, len(why)) + why, socket.MSG_DONTWAIT)
                connection.close()
                return
            reader.watch = watch_process(connection, functools.partial(self._shut_down, reader))
            reader.connection, reader.process = connection, str(connection.peer)
            self._give(reader, HEADER.pack(Kind.JOINED, 0))
            for header, fd in self._kept:
                self._give(reader, header, fd)
            self._drop_kept()
            self._wake()

    def _listen_to_readers(self) -> None:
        for each in self._readers.values():
            self._listen_to(each)
        self._drop_kept()

    def _listen_to(self, reader: Attached) -> None:
        """What it has told meanwhile."""
        while reader.connection is not None and not self._closed:
            try:
                news = reader.connection.sock.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as e:
                news = b""
                _log.debug("reader rank %d: %s", reader.rank, e)
            if not news:
                self._evict(reader, "its process ended, or it was aborted", died=True)
                return
            reader.taken += news.count(News.TAKEN)
            reader.is_ready |= News.READY in news
            if reader.taken > self._sent or not set(news) <= set(News):
                self._evict(reader, "it sends what no reader sends", died=True)
            elif News.LEFT in news:
                self._evict(reader, "has left", died=False)

    def _evict(self, reader: Attached, why: str, *, died: bool) -> None:
        """It is waited for no longer, and gets no more."""
        connection, reader.connection = reader.connection, None
        reader.gone, reader.died = why, died
        if reader.watch is not None:
            reader.watch.close()
        if connection is not None:
            connection.close()
        _log.log(
            logging.WARNING if died else logging.DEBUG, "evicted from a queue: %s", reader.state(self._sent)
        )

    # -- the end -------------------------------------------------------------------------------

    def dequeue(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> NoReturn:
        self._check_open()
        self._check_reader()
        raise AssertionError

    acquire_read: Any = dequeue

    def _wake(self) -> None:
        """The call that waits looks again."""
        if self._descriptors.enter():
            os.eventfd_write(self._event, 1)
            self._descriptors.leave()

    def _hang_up(self, polite: bool) -> None:
        """What was sent is in the readers' sockets, and can still be received."""
        self._wake()
        for each in self._readers.values():
            if each.watch is not None:
                each.watch.close()
            self._shut_down(each)

    def _shut_down(self, reader: Attached) -> None:
        """What it has told can still be received. Then its connection has ended."""
        with self._lock, contextlib.suppress(OSError):
            if reader.connection is not None:
                reader.connection.sock.shutdown(socket.SHUT_RDWR)

    def _end(self, *, polite: bool) -> None:
        super()._end(polite=polite)
        self._acceptor.close()

    def _close_descriptors(self) -> None:
        event, self._event = self._event, -1  # a forked child closes again what is open there
        if event >= 0:
            os.close(event)
        for each in self._readers.values():
            if each.connection is not None:
                each.connection.close()
        while self._kept:
            os.close(self._kept.popleft()[1])
