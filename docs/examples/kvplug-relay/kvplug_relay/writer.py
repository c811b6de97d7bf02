"""The writer's end. It admits readers, sends each message to all of them, and counts their confirmations."""

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
"""How many seconds a process that has connected may take to send its rank."""
_log = logging.getLogger(__name__)


@attrs.define(eq=False)
class Attached:
    """The writer's record of one reader."""

    rank: int
    connection: Connection | None = None
    watch: Watch | None = None
    process: str = "has not come yet"
    taken: int = 0
    """How many messages the reader has confirmed."""
    is_ready: bool = False
    gone: str = ""
    died: bool = False

    def state(self, sent: int) -> MessageQueue.ReaderState:
        return MessageQueue.ReaderState(
            rank=self.rank, process=self.process, lag=sent - self.taken, gone=self.gone, died=self.died
        )


class Writer(End):
    """The end of the writer. Its thread only admits readers; its calls read their news."""

    def __init__(self, context: QueueEndpoint.Context, name: str, ranks: Sequence[int]) -> None:
        self._name = name
        self._readers = {rank: Attached(rank) for rank in ranks}
        self._sent = 0
        self._kept: deque[tuple[bytes, int]] = deque()
        """Header and descriptor of every message so far, until all readers have attached."""
        self._is_ready = self._has_sent_ready = False
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes a waiting call
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
            self._read_all_news()
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
            raise CapacityError(f"{nbytes} bytes were requested, but a chunk has {size}")
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
        """Send a message to every attached reader, and keep it for the readers that attach later."""
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
                self._send_to(each, header, memory.fd)
            self._drop_kept()

    def _send_to(self, reader: Attached, header: bytes, *fds: int) -> None:
        if reader.connection is None:
            return
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            reader.connection.sock.sendmsg([header], control, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionError):
            self._read_news(reader)  # the reader may have left
        except OSError as e:  # for example, too many descriptors are in transit
            self._evict(reader, f"a message cannot be sent to it: {e}", died=True)

    def _drop_kept(self) -> None:
        """Close the kept messages if all readers have attached: the kernel keeps them until they are read."""
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
                if not self._has_sent_ready:
                    self._has_sent_ready = True
                    for each in self._readers.values():
                        self._send_to(each, HEADER.pack(Kind.READY, 0))

    def _wait_until(self, done: Any, wait: MessageQueue.Wait) -> None:
        while True:
            with self._lock:
                self._read_all_news()
                self._check_open()
                if self._readers and all(each.gone for each in self._readers.values()):
                    raise PeerGoneError(
                        f"all readers have ended: {self._named(list(self._readers.values()))}"
                    )
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
        """Admit or refuse a reader. Runs in a thread of the acceptor, which closes the connection if this
        raises."""
        data = connection.receive(JOIN.size, Deadline.after(_JOIN_S))
        (rank,) = JOIN.unpack(data)
        with self._lock:
            reader = self._readers.get(rank)
            if self._closed or reader is None or reader.connection is not None or reader.gone:
                why = f"rank {rank} is not a reader of this queue, or has attached already".encode()
                connection.sock.send(HEADER.pack(Kind.REFUSED, len(why)) + why, socket.MSG_DONTWAIT)
                connection.close()
                return
            reader.watch = watch_process(connection, functools.partial(self._shut_down, reader))
            reader.connection, reader.process = connection, str(connection.peer)
            self._send_to(reader, HEADER.pack(Kind.JOINED, 0))
            for header, fd in self._kept:
                self._send_to(reader, header, fd)
            self._drop_kept()
            self._wake()

    def _read_all_news(self) -> None:
        for each in self._readers.values():
            self._read_news(each)
        self._drop_kept()

    def _read_news(self, reader: Attached) -> None:
        """Read the bytes that a reader has sent since the last call."""
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
                self._evict(reader, "it sent invalid bytes", died=True)
            elif News.LEFT in news:
                self._evict(reader, "has left", died=False)

    def _evict(self, reader: Attached, why: str, *, died: bool) -> None:
        """Send no more messages to a reader, and do not wait for it any more."""
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
        """Wake a waiting call, which checks its condition again."""
        if self._descriptors.enter():
            os.eventfd_write(self._event, 1)
            self._descriptors.leave()

    def _hang_up(self, polite: bool) -> None:
        """End the connections. The messages in the readers' sockets can still be received."""
        self._wake()
        for each in self._readers.values():
            if each.watch is not None:
                each.watch.close()
            self._shut_down(each)

    def _shut_down(self, reader: Attached) -> None:
        """Shut a reader's connection down. The bytes that it has sent can still be read."""
        with self._lock, contextlib.suppress(OSError):
            if reader.connection is not None:
                reader.connection.sock.shutdown(socket.SHUT_RDWR)

    def _end(self, *, polite: bool) -> None:
        super()._end(polite=polite)
        self._acceptor.close()

    def _close_descriptors(self) -> None:
        event, self._event = self._event, -1  # a forked child must not close it twice
        if event >= 0:
            os.close(event)
        for each in self._readers.values():
            if each.connection is not None:
                each.connection.close()
        while self._kept:
            os.close(self._kept.popleft()[1])
