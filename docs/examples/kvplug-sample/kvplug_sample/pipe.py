"""The pipe "sample": one authenticated socket, one thread that writes, and whoever receives reads.

A message is a frame of kvplug.net.wire: a header, then for a tensor its meta and its bytes.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, Header, decode_header, encode_header
from kvplug.net.wire.tensors import copy_into, empty_like_meta, encode_meta, memory_of, meta_of, split_meta
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Connection,
    Deadline,
    ExclusiveUse,
    Listener,
    Pipe,
    PipeContext,
    PipeEndpoint,
    PipeListener,
    TensorMismatchError,
    Timeout,
    Transfer,
    Watch,
    WireError,
    close_after_fork,
    dial,
    watch,
)

if TYPE_CHECKING:
    from torch import Tensor

PURPOSE = "kvplug-sample pipe"  # both ends prove that they mean this; another protocol's listener refuses
NAME = "sample"  # contacts begin with it, so that another transport's is known for one
MAX_LENGTH = 2**40  # what a frame may claim; its sender has proved itself before we read a byte of it


class SampleEndpoint(PipeEndpoint):
    """What kvplug asks for: the factory of the spec, called with a context."""

    def __init__(self, context: PipeContext) -> None:
        self._context = context

    def listen(self) -> PipeListener:
        return SampleListener(Listener.open("unix:", self._context.credentials, PURPOSE), self._context)

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        seconds = Deadline.after(timeout, self._context.timeout_s).remaining()
        name, _, address = contact.partition(":")
        if name != NAME:
            raise WireError(f"this is no contact of the pipe {NAME!r}: pass on what listen() gave")
        return SamplePipe(dial(address, self._context.credentials, PURPOSE, seconds), self._context)


class SampleListener(PipeListener):
    def __init__(self, listener: Listener, context: PipeContext) -> None:
        self._listener, self._context = listener, context

    @property
    def contact(self) -> str:
        return f"{NAME}:{self._listener.contact}"

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._context.timeout_s)
        while True:
            connection = self._listener.accept(deadline.remaining())
            with contextlib.suppress(PeerGoneError):  # it died while it waited: that is nobody else's trouble
                return SamplePipe(connection, self._context)

    def close(self) -> None:
        self._listener.close()


class SamplePipe(Pipe):
    def __init__(self, connection: Connection, context: PipeContext) -> None:
        self._connection, self._sock = connection, connection.sock
        self._limit: int = context.options.max_in_flight_bytes
        self._timeout_s = context.timeout_s
        self._changed = threading.Condition()  # guards everything below but the half-received frame
        self._queue: deque[tuple[Transfer, list[memoryview]]] = deque()  # not yet being written
        self._writing: Transfer | None = None
        self._unsent = 0  # bytes, of the one being written too
        self._closing = self._closed = False
        self._gone = ""  # why, once the peer is
        self._users = 0  # threads that may be inside a system call on the socket
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._header: Header | None = None  # of the frame whose payload is being received
        self._frame, self._filled = bytearray(HEADER_SIZE), 0
        self._sock.setblocking(False)
        self._writer: threading.Thread | None = None
        self._pidfd: int | None = None
        self._watch: Watch | None = None
        close_after_fork(self)
        try:
            self._pidfd = connection.peer.open_pidfd()
        except PeerGoneError:
            connection.close()
            raise
        self._watch = watch(pidfd=self._pidfd, sock=self._sock, on_gone=self._lose)

    @property
    def closed(self) -> bool:
        return self._closed or self._closing

    @property
    def peer(self) -> str:
        return self._connection.describe

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        parts = _parts(tensor)  # refuses what is not carried before anything is queued
        transfer = Transfer(sum(map(len, parts)))
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._sending.taken(), self._changed:
            while self._unsent and self._unsent + transfer.nbytes > self._limit and not self._over:
                if not self._changed.wait(deadline.remaining()):
                    raise TimeoutError(f"{self.peer} did not take {self._unsent} bytes sent earlier in time")
            if self._over or self._closing:
                raise self._error()
            self._unsent += transfer.nbytes
            self._queue.append((transfer, parts))
            self._changed.notify_all()
            if self._writer is None:
                self._users += 1
                self._writer = threading.Thread(target=self._write, name="kvplug-sample", daemon=True)
                self._writer.start()
        return transfer

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._receiving.taken(), self._inside():
            header = self._arrive(deadline)
            tensor = out
            if header.kind is FrameKind.TENSOR:
                meta, flat = split_meta(self._frame)
                if out is not None and meta_of(out) != meta:
                    raise TensorMismatchError(f"the next message is {meta}, and out is {meta_of(out)}")
                tensor = empty_like_meta(meta) if out is None else out
                copy_into(tensor, flat)
            elif header.kind is not FrameKind.NONE:
                raise WireError(f"a pipe has no {header.kind.name} frames")
            elif out is not None:
                raise TensorMismatchError("the next message is None, and out was given")
            self._header, self._frame, self._filled = None, bytearray(HEADER_SIZE), 0
            return tensor

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._unsent or self._over, deadline.remaining())
        self.abort()
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():  # a callback may close as well
            writer.join()

    def abort(self) -> None:
        if not self._closed:
            self._end(closed=True)

    # -- how it ends ---------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        return self._closed or bool(self._gone)

    def _error(self) -> KvplugError:
        if self._closed or self._closing:
            return ClosedError(f"the pipe to {self.peer} is closed")
        return PeerGoneError(f"{self.peer} is gone: {self._gone}")

    def _lose(self, reason: str) -> None:
        """The peer is gone. Called by whoever notices first: the watcher, the writer or a receiver."""
        if not self._over:
            self._end(gone=reason)

    def _end(self, *, closed: bool = False, gone: str = "") -> None:
        with self._changed:
            self._closed, self._gone = self._closed or closed, self._gone or gone
            unsent, self._queue = self._queue, deque()
            self._changed.notify_all()
            with contextlib.suppress(OSError):
                self._sock.shutdown(2)  # wakes who is blocked; what has arrived stays readable
        if self._watch is not None:
            self._watch.close()
        for transfer, _ in unsent:
            transfer.fail(self._error())
        self._release()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Around receiving. What had wholly arrived before the peer died may still be received, and the
        descriptor is not closed meanwhile: its number might be another file's by then.
        """
        with self._changed:
            if self._closed or self._closing:
                raise self._error()
            self._users += 1
        try:
            yield
        finally:
            self._release(1)

    def _release(self, users: int = 0) -> None:
        """Close the descriptors once it is closed and nobody is inside."""
        with self._changed:
            self._users -= users
            if self._closed and not self._users:
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._sock.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _after_fork_in_child(self) -> None:
        self._closed = True
        # What threads that are not here may hold is made anew, and what they work on ends.
        self._changed = threading.Condition()
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._writer = None  # one that was about to start here never will
        for transfer in (self._writing, *(transfer for transfer, _ in self._queue)):
            if transfer is not None:
                transfer.inherit(self._error())
        self._close_descriptors()

    # -- bytes ---------------------------------------------------------------------------------

    def _write(self) -> None:
        """The thread. It alone ends the transfer it works on: what the kernel took whole has succeeded."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._closing or self._over)
                    if not self._queue:
                        return
                    transfer, parts = self._queue[0]
                    self._writing = transfer  # before it leaves the queue: a fork may come in between
                    self._queue.popleft()
                try:
                    self._put(parts)
                except OSError as e:
                    self._lose(e.strerror or str(e))
                    transfer.fail(self._error())
                    return
                del parts  # or this thread would keep the last tensor alive
                with self._changed:
                    self._unsent -= transfer.nbytes
                    self._changed.notify_all()
                transfer.finish()
                self._writing = None
        finally:
            self._release(1)

    def _put(self, parts: list[memoryview]) -> None:
        for part in parts:
            while part:
                try:
                    part = part[self._sock.send(part) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, Deadline.after(None))

    def _arrive(self, deadline: Deadline) -> Header:
        """Receive the next frame, or the rest of it: what has arrived is kept when the time is up."""
        while True:
            while self._filled < len(self._frame):
                try:
                    n = self._sock.recv_into(memoryview(self._frame)[self._filled :])
                except BlockingIOError:
                    self._wait(select.POLLIN, deadline)
                    continue
                except OSError:
                    n = 0
                if n == 0:
                    self._lose("it closed the connection")
                    raise self._error()
                self._filled += n
            if self._header is not None:
                return self._header
            header = decode_header(self._frame, max_length=MAX_LENGTH)
            self._header, self._frame, self._filled = header, bytearray(header.length), 0

    def _wait(self, event: int, deadline: Deadline) -> None:
        poll, seconds = select.poll(), deadline.remaining()
        poll.register(self._sock, event)
        if not poll.poll(None if seconds is None else seconds * 1000):
            raise TimeoutError(f"nothing came from {self.peer} in time")


def _parts(tensor: Tensor | None) -> list[memoryview]:
    """The frame of one message, the tensor's bytes uncopied."""
    if tensor is None:
        return [memoryview(encode_header(FrameKind.NONE, 0))]
    meta, data = encode_meta(meta_of(tensor)), memory_of(tensor)
    return [memoryview(encode_header(FrameKind.TENSOR, len(meta) + len(data)) + meta), data]
