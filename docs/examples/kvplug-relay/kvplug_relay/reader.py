"""A reader's end. It receives messages from its socket, and confirms each of them to the writer."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from kvplug import (
    ConfigError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    UnsupportedError,
)
from kvplug.net.wire import Limits, decode
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Connection,
    Deadline,
    MessageQueue,
    NamedExhaustion,
    QueueEndpoint,
    Timeout,
    Watch,
    WireError,
    peer_text,
)
from kvplug_relay.end import End, watch_process
from kvplug_relay.message import HEADER, JOIN, Kind, News, map_received

LIMITS = Limits(max_bytes=1 << 40)
"""Larger than any value: the writer holds the value in its memory, which is the limit."""
_WHOLE_S = 5.0
"""How many seconds the rest of a header may take to arrive. The writer sends a header in one call."""


class Reader(End):
    """The end of one rank. It needs no thread: messages wait in the socket."""

    def __init__(
        self, context: QueueEndpoint.Context, handle: QueueEndpoint.Handle, rank: int, connection: Connection
    ) -> None:
        self._handle = handle
        self._connection = connection
        self._arrived: deque[tuple[Kind, int, int]] = deque()  # kind, bytes, descriptor
        self._all_ready = False
        self._broken: KvplugError | None = None
        self._watch: Watch | None = None
        super().__init__(context, rank)
        try:
            self._watch = watch_process(connection, self._shut_down)
        except BaseException:
            self.abort()
            raise

    def join(self, deadline: Deadline) -> None:
        """Ask the writer to admit this rank. All resources of the reader were acquired before.

        Raises:
            ConfigError: the writer refused the rank; the error has the reason.
            PeerGoneError, TimeoutError, WireError: there was no answer, or an invalid one.
        """
        sock = self._connection.sock
        try:
            sock.settimeout(None)
            sock.sendall(JOIN.pack(self._rank))
            data = self._connection.receive(HEADER.size, deadline)
            kind, nbytes = HEADER.unpack(data)
            if kind == Kind.REFUSED and nbytes <= 1000:
                why = self._connection.receive(nbytes, deadline)
                raise ConfigError(peer_text(why.decode(errors="replace")))
        except OSError as e:
            if isinstance(e, KvplugError):
                raise
            raise PeerGoneError(f"{self._connection.describe} hung up: {e}") from e
        if kind != Kind.JOINED:
            raise WireError(f"{self._connection.describe} sent an invalid answer")

    @property
    def readers(self) -> NoReturn:
        raise UnsupportedError("only the writer's end knows the readers")

    def export_handle(self) -> QueueEndpoint.Handle:
        self._check_open()
        return self._handle

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        peers = "the writer, or readers that it waits for"
        wait = self._wait("all to be ready", lambda: peers, self._deadline(timeout))
        with self._call():
            self._notify(News.READY)
            while not self._all_ready:
                self._receive(wait)

    def dequeue(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        with (
            self._next(Kind.VALUE, timeout, cancel, indefinite) as (content, nbytes),
            memoryview(content) as whole,
            whole[:nbytes] as view,
        ):
            return decode(view, limits=LIMITS)

    @contextmanager
    def acquire_read(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Iterator[memoryview]:
        with (
            self._next(Kind.CHUNK, timeout, cancel, indefinite) as (content, nbytes),
            memoryview(content) as whole,
            whole[:nbytes] as view,
        ):
            yield view

    @contextmanager
    def _next(
        self, wanted: Kind, timeout: Timeout, cancel: threading.Event | None, indefinite: bool
    ) -> Iterator[tuple[mmap.mmap, int]]:
        """Yield the content of the next message. The message counts as read when the block ends."""
        timeout = None if indefinite and timeout is DEFAULT_TIMEOUT else timeout
        deadline = self._deadline(timeout)
        wait = self._wait("a message", lambda: "the writer", deadline, cancel=cancel, indefinite=indefinite)
        with self._call():
            while not self._arrived:
                self._receive(wait)
            kind, nbytes, fd = self._arrived[0]
            if kind is not wanted:
                names = {Kind.VALUE: "a value, for dequeue", Kind.CHUNK: "a chunk of bytes, for acquire_read"}
                raise UnsupportedError(f"the next message is {names[kind]}")
            try:
                with NamedExhaustion("mapping a message"):  # the message can be received later
                    content = map_received(os.dup(fd), nbytes)
            except WireError as e:
                raise self._break(e) from e
            try:
                yield content, nbytes
            except ResourceExhaustedError:
                raise  # the message can be received when there is memory
            except BaseException:
                self._take()
                raise
            else:
                self._take()

    def _take(self) -> None:
        _, _, fd = self._arrived.popleft()
        os.close(fd)
        self._notify(News.TAKEN)

    def _receive(self, wait: MessageQueue.Wait) -> None:
        """Receive one message. Sleep until it arrives, as long as ``wait`` permits."""
        if self._broken is not None:
            raise self._broken
        while (first := self._peek()) is None:
            self._poll([self._connection.fileno()], wait.pause())
        if not first:
            self._check_open()
            who = f"the writer, {self._connection.peer},"
            raise self._break(PeerGoneError(f"{who} has ended, and all its messages were received"))
        try:
            data, fds = self._connection.receive_fds(HEADER.size, 1, Deadline.after(_WHOLE_S))
            kind, nbytes = HEADER.unpack(data)
            self._arrive(kind, nbytes, fds)
        except (TimeoutError, WireError) as e:
            raise self._break(e) from e

    def _peek(self) -> bytes | None:
        """Return the next byte without receiving it: empty if the connection has ended, ``None`` if no byte
        has arrived."""
        try:
            return self._connection.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:  # the writer closed the connection with unread bytes
            return b""

    def _arrive(self, kind: int, nbytes: int, fds: list[int]) -> None:
        if kind == Kind.READY and not fds:
            self._all_ready = True
        elif kind in (Kind.VALUE, Kind.CHUNK) and len(fds) == 1:
            self._arrived.append((Kind(kind), nbytes, fds[0]))
        else:
            for fd in fds:
                os.close(fd)
            raise WireError(f"{self._connection.describe} sent an invalid message")

    def _break(self, error: KvplugError) -> KvplugError:
        """Keep an error, which all later calls that receive raise, and return it."""
        self._broken = type(error)(str(error))
        return error

    def _notify(self, news: News) -> None:
        with contextlib.suppress(OSError):  # the next receiving call notices that the writer is gone
            self._connection.sock.send(bytes([news]), socket.MSG_DONTWAIT)

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> NoReturn:
        self._check_open()
        self._check_writer()
        raise AssertionError

    acquire_write: Any = enqueue

    def _hang_up(self, polite: bool) -> None:
        if polite:
            self._notify(News.LEFT)
        if self._watch is not None:
            self._watch.close()
        self._shut_down()

    def _shut_down(self) -> None:
        """Shut the connection down. Messages that have arrived can still be received."""
        if self._descriptors.enter():
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
            self._descriptors.leave()

    def _close_descriptors(self) -> None:
        self._connection.close()
        while self._arrived:
            os.close(self._arrived.popleft()[2])
