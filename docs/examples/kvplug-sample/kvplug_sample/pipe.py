"""The pipe "sample": one authenticated socket, one thread that writes, and the caller's thread that reads.

A message is a prefix in the format of kvplug.net.wire, followed by the bytes of the tensor, if it is one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from kvplug import KvplugError, TimeoutError
from kvplug.net.wire.messages import message_parts, prefix_size, read_prefix
from kvplug.net.wire.tensors import memory_of_writable
from kvplug.transport import (
    BackgroundThread,
    Connection,
    Deadline,
    DescriptorGuard,
    DuplexEndpoint,
    DuplexPipe,
    PartialMessage,
    SendWindow,
    Timeout,
    Transfer,
    Watch,
    WireError,
)

if TYPE_CHECKING:
    from torch import Tensor


class SampleContact(DuplexEndpoint.Contact):
    """The contact of a listener: the transport's name and version, a domain and an address."""

    TRANSPORT = "sample"
    ONLY_UNIX = True
    UNREACHABLE = "the peer listens on a Unix socket of another host or network namespace"


class SampleEndpoint(DuplexEndpoint):
    """The factory of the spec: kvplug calls it with a context."""

    CONTACT = SampleContact
    PURPOSE = "kvplug-sample pipe"

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> SamplePipe:
        try:
            return SamplePipe(connection, self._context)
        except BaseException:
            connection.close()
            raise


class SamplePipe(DuplexPipe):
    def __init__(self, connection: Connection, context: DuplexEndpoint.Context) -> None:
        super().__init__(connection.describe, self.Settings.of(context))
        self._sock = connection.sock
        self._sock.settimeout(None)
        self._readable = select.poll()
        self._readable.register(self._sock, select.POLLIN)
        self._descriptors = DescriptorGuard(connection.close, self._lifecycle.error)
        self._window = SendWindow(
            limit=context.options.max_in_flight_bytes, peer=self._peer, lifecycle=self._lifecycle
        )
        self._queue: deque[tuple[Transfer, list[memoryview]]] = deque()
        self._written: Transfer | None = None  # the transfer that the thread is writing
        self._queued = threading.Condition(self._window.lock)
        self._writer: BackgroundThread | None = None
        self._prefix = bytearray()  # the part of the next message's prefix that has arrived
        self._message: PartialMessage | None = None  # the message whose prefix has arrived
        pidfd = connection.peer.open_pidfd()
        self._watch = Watch(pidfd=pidfd, sock=self._sock, on_gone=self._peer_gone)

    # -- sending -------------------------------------------------------------------------------

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        parts = message_parts(tensor)  # raises for an unsupported tensor, before anything is queued
        transfer = Transfer(0 if tensor is None else len(parts[1]))
        with self._window.lock:
            self._window.wait_for_room(transfer.nbytes, self._deadline(timeout))
            if self._writer is None:
                writer = BackgroundThread(self._write, name="kvplug-sample", stop=self.abort)
                writer.start()
                self._writer = writer
            self._window.add(self._window.cost(transfer.nbytes))
            self._queue.append((transfer, parts))
            self._queued.notify()
        if self._window.ended:  # a signal handler ended the pipe after there was room
            self._fail_queue()
        return transfer

    def _write(self) -> None:
        """Send the queued messages. Runs in the thread. A transfer succeeds once the kernel has all its
        bytes."""
        with contextlib.suppress(KvplugError), self._descriptors:
            while True:
                with self._window.lock:
                    while not self._queue:
                        if self._window.ended:
                            return
                        self._queued.wait()
                    transfer, parts = self._queue.popleft()
                    self._written = transfer
                try:
                    for part in parts:
                        self._sock.sendall(part)
                    error = None
                except OSError as e:
                    self._peer_gone(f"the connection broke while sending: {e.strerror or e}")
                    error = self._lifecycle.error()
                del parts  # otherwise this thread would keep the last tensor alive
                with self._window.lock:
                    self._window.settle(self._window.cost(transfer.nbytes))
                if error is None:
                    transfer.finish()
                else:
                    transfer.fail(error)

    # -- receiving -----------------------------------------------------------------------------

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        deadline = self._deadline(timeout)
        with self._descriptors:
            message = self._message = self._message or self._next_message(deadline)
            message.check_out(out)
            tensor = None
            if message.meta is not None:
                tensor = message.receive(
                    out,
                    fill=lambda tensor: self._fill(message, tensor, deadline),
                    fail=self._fail,
                    peer=self._peer,
                    limit=self._limit,
                )
            self._message = None
            return tensor

    def _next_message(self, deadline: Deadline) -> PartialMessage:
        """Receive the next message's prefix. At the deadline, the part that has arrived is kept."""
        try:
            while missing := prefix_size(bytes(self._prefix)) - len(self._prefix):
                rest = memoryview(bytearray(missing))
                got = self._read(rest, deadline)
                self._prefix += rest[:got]
                if got < missing:
                    raise TimeoutError(f"no message has arrived from {self._peer}")
            announced = read_prefix(bytes(self._prefix))
            if announced.goodbye:
                raise WireError("it sent a goodbye, which this pipe does not use")
        except WireError as e:
            self._fail(f"the peer sent an invalid message: {e}")
            raise
        self._prefix = bytearray()
        return PartialMessage(announced.meta)

    def _fill(self, message: PartialMessage, tensor: Tensor, deadline: Deadline) -> bool:
        message.got += self._read(memory_of_writable(tensor)[message.got :], deadline)
        return message.got == message.nbytes

    def _read(self, view: memoryview, deadline: Deadline) -> int:
        """Fill ``view`` and return the number of bytes, which is less than its length only at the deadline.
        Raises the pipe's error if the connection ends."""
        got = 0
        while got < len(view):
            seconds = deadline.remaining()
            if not self._readable.poll(None if seconds is None else seconds * 1000):
                break
            try:
                n = self._sock.recv_into(view[got:], 0, socket.MSG_DONTWAIT)
            except OSError:
                n = 0
            if n == 0:
                self._peer_gone("the connection ended")
                raise self._lifecycle.error()
            got += n
        return got

    # -- how it ends ---------------------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        self._window.drain(deadline)

    def _stop(self) -> None:
        """Wake every thread, and fail queued transfers. Messages that have arrived can still be received."""
        if self._descriptors.enter():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._descriptors.leave()
        self._fail_queue()

    _on_peer_gone = _on_failure = _stop

    def _fail_queue(self) -> None:
        with self._window.lock:
            unsent, self._queue = self._queue, deque()
            self._window.end()
            self._queued.notify()
        for transfer, _ in unsent:
            transfer.fail(self._lifecycle.error())

    def _release(self) -> None:
        self._stop()
        self._watch.close()
        self._descriptors.retire()

    def _join_threads(self) -> None:
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(1.0)
