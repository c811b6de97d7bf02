"""The pipe "cpu": one or more stream sockets, what sends on them, and a watch on the peer.

    connection 0:  header (16 bytes) | meta | tensor bytes, or the first part of them
    connection k:                             the k-th part of a split tensor

The header's length counts everything after it, on all connections. A tensor is split over all of them when
the header's flag says so; both ends compute the parts from its size and the number of connections. GOODBYE is
the last thing on connection 0 of a pipe that was closed politely.

A message is first sent in the caller's own thread, without waiting: a small one is sent before another thread
would have woken up. What the kernel does not accept at once is left to one writer thread per connection,
started when first needed. An idle writer sleeps on a condition.

Whole buffers are handed to the kernel in blocking calls, one thread per connection and direction. Measured
against non-blocking sockets with ``poll`` this is a third to a half faster: the kernel lets sender and
receiver alternate on one core while the bytes are still in its cache. Python drops the interpreter lock
during each call.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvplug.net.wire.messages import GOODBYE, NONE, tensor_prefix
from kvplug.net.wire.tensors import memory_of
from kvplug.transport import (
    BackgroundThread,
    Connection,
    Deadline,
    DescriptorGuard,
    DuplexPipe,
    PartialMessage,
    SendWindow,
    Timeout,
    Transfer,
    Watch,
)
from kvplug_cpu.inbox import SPLIT, Inbox, parts

if TYPE_CHECKING:
    from torch import Tensor

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_NOT_NOW = socket.MSG_DONTWAIT | _NO_SIGNAL
_SIOCOUTQ = 0x5411
_LOOPBACK_TCP_BUFFER_BYTES = 64 * 1024
"""On loopback a small buffer stays in the cache: 7.4 GB/s against 4.0 with the kernel's tuning."""
_BATCH_BYTES = 256 * 1024
_BATCH_VIEWS = 64


class _Message:
    __slots__ = ("cost", "shares_left", "transfer")

    def __init__(self, nbytes: int, shares: int, cost: int) -> None:
        self.cost = cost
        self.shares_left = shares
        self.transfer = Transfer(nbytes)


class _Share:
    """The part of one message that goes over one connection. Its views keep the tensor alive."""

    __slots__ = ("message", "nbytes", "views")

    def __init__(self, message: _Message, views: list[memoryview]) -> None:
        self.message = message
        self.views = [view for view in views if len(view)]
        self.nbytes = sum(map(len, self.views))

    def advance(self, sent: int) -> None:
        self.nbytes -= sent
        while sent:
            if sent < len(self.views[0]):
                self.views[0] = self.views[0][sent:]
                return
            sent -= len(self.views.pop(0))


class _Queue:
    """What is left to be sent on one connection, and the thread that sends it."""

    def __init__(self, sock: socket.socket, lock: threading.RLock) -> None:
        self.sock = sock
        self.shares: deque[_Share] = deque()
        self.changed = threading.Condition(lock)
        self.thread: threading.Thread | None = None


class CpuPipe(DuplexPipe):
    """One control connection, which is only watched, and one or more data connections for tensors.

    Threads: up to one writer per data connection and one reader per data connection but the first, started by
    the first message that needs them, gone with the pipe. The process's liveness watcher looks at the peer.
    """

    @attrs.frozen(kw_only=True)
    class Settings(DuplexPipe.Settings):
        """The settings of a pipe. Sizes are in bytes."""

        max_in_flight_bytes: int
        split_bytes: int
        socket_buffer_bytes: int

    def __init__(
        self,
        control: Connection,
        data: list[Connection],
        settings: CpuPipe.Settings,
        *,
        pidfd: int | None,
        heartbeat_interval_s: float | None,
    ) -> None:
        """Takes ownership of the connections and of the peer's ``pidfd``.

        ``heartbeat_interval_s``: set if at least one of the two ends has no pidfd of the other; then both
        send heartbeats this often.
        """
        super().__init__(control.describe, settings)
        self._control = control
        self._socks = [each.sock for each in data]
        for sock in self._socks:
            sock.settimeout(None)
            with contextlib.suppress(OSError):  # the peer is gone already; the first use reports it
                _tune(sock, settings.socket_buffer_bytes)
        self._split_bytes = settings.split_bytes
        self._descriptors = DescriptorGuard(self._close_sockets, self._lifecycle.error)
        self._window = SendWindow(
            limit=settings.max_in_flight_bytes, peer=self._peer, lifecycle=self._lifecycle
        )
        self._lock = self._window.lock
        self._queues = [_Queue(sock, self._lock) for sock in self._socks]
        self._inbox = Inbox(
            self._socks,
            peer=self._peer,
            message_limit=self._limit,
            lifecycle=self._lifecycle,
            descriptors=self._descriptors,
            lost=self._peer_gone,
            fail=self._fail,
            stop=self.abort,
        )
        self._watch = Watch(
            pidfd=pidfd,
            sock=control.sock,
            interval_s=heartbeat_interval_s,
            timeout_s=settings.heartbeat_timeout_s,
            on_gone=self._peer_gone,
        )

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        with self._descriptors:
            return self._inbox.receive(out, self._deadline(timeout))

    # -- sending ---------------------------------------------------------------------------------------

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        with self._descriptors:
            return self._send(tensor, self._deadline(timeout))

    def _send(self, tensor: Tensor | None, deadline: Deadline) -> Transfer:
        memory, nbytes, prefix = memoryview(b""), 0, NONE
        bounds = [(0, 0)]
        if tensor is not None:
            memory = memory_of(tensor)
            nbytes = len(memory)
            split = nbytes >= self._split_bytes
            prefix = tensor_prefix(tensor.dtype, tensor.shape, nbytes, SPLIT if split else 0)
            bounds = parts(nbytes, len(self._queues)) if split else [(0, nbytes)]
        message = _Message(nbytes, len(bounds), self._window.cost(nbytes))
        views = [[memory[start:stop]] for start, stop in bounds]
        views[0].insert(0, memoryview(prefix))
        shares = [_Share(message, each) for each in views]
        with self._lock:
            self._window.wait_for_room(nbytes, deadline)
            self._window.add(message.cost)
            # A writer drops a share only after it was sent, so no writer works on an empty queue, and this
            # thread, the only sender, may write to its connection.
            idle = [not queue.shares for queue in self._queues]
        try:
            for queue, share, free in zip(self._queues, shares, idle, strict=False):
                if free:
                    share.advance(_send_now(queue.sock, share.views) if share.nbytes else 0)
        except OSError as e:
            self._sending_lost(e)
        except BaseException:
            # Ctrl-C between the system call and its accounting: the stream's position is lost.
            self._fail(PartialMessage.INTERRUPTED)
            raise
        try:
            with self._lock:
                for queue, share in zip(self._queues, shares, strict=False):
                    if not share.nbytes:
                        message.shares_left -= 1
                    elif not self._window.ended:
                        queue.shares.append(share)
                        self._wake(queue)
                done, ended = message.shares_left == 0, self._window.ended
                if done:
                    self._window.settle(message.cost)
        except BaseException as e:
            # For example, no thread could be started. A part of the message may be sent, and the rest will
            # not be.
            self._fail(f"the rest of a message could not be left to a writer: {e!r}")
            raise
        if done:
            message.transfer.finish()
        elif ended:
            message.transfer.fail(self._lifecycle.error())
        return message.transfer

    def _wake(self, queue: _Queue) -> None:
        if queue.thread is not None:
            queue.changed.notify()
        elif self._descriptors.enter():
            name = f"kvplug-cpu-send-{self._queues.index(queue)}"
            thread = BackgroundThread(self._write, args=(queue,), name=name, stop=self.abort)
            try:
                thread.start()
            except Exception:  # after Ctrl-C the thread may run, and leave itself
                self._descriptors.leave()
                raise
            queue.thread = thread

    def _write(self, queue: _Queue) -> None:
        try:
            while batch := self._next_batch(queue):
                self._sent(queue, batch, _give(queue.sock, batch))
                del batch  # do not keep the sent memory alive while waiting for more
        except OSError as e:
            self._sending_lost(e)
        except Exception as e:
            self._fail(f"writing to a connection failed: {e!r}")
        finally:
            self._descriptors.leave()

    def _next_batch(self, queue: _Queue) -> list[_Share]:
        """The oldest share and small ones behind it, so that a stream of small messages needs few calls."""
        with self._lock:
            while not queue.shares and not self._window.ended:
                queue.changed.wait()
            batch: list[_Share] = []
            views = nbytes = 0
            for share in queue.shares:
                views, nbytes = views + len(share.views), nbytes + share.nbytes
                if batch and (nbytes > _BATCH_BYTES or views > _BATCH_VIEWS):
                    break
                batch.append(share)
            return batch

    def _sent(self, queue: _Queue, batch: list[_Share], sent: int) -> None:
        finished = []
        with self._lock:
            if self._window.ended:
                return
            for share in batch:
                step = min(sent, share.nbytes)
                share.advance(step)
                sent -= step
                if share.nbytes:
                    break
                queue.shares.popleft()
                share.message.shares_left -= 1
                if not share.message.shares_left:
                    self._window.settle(share.message.cost)
                    finished.append(share.message)
        for message in finished:
            message.transfer.finish()

    # -- how it ends -----------------------------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        self._shutdown(socket.SHUT_RD)
        if self._window.drain(deadline):
            self._say_goodbye(deadline)

    def _say_goodbye(self, deadline: Deadline) -> None:
        """Wait for the delivery of the last message. There is no event for it: poll, at most every 10 ms."""
        if not self._descriptors.enter():
            return
        try:
            _send_now(self._socks[0], [memoryview(GOODBYE)])
            pause = 0.0001
            while any(map(_undelivered, self._socks)):
                if deadline.expired or self._descriptors.retired or self._lifecycle.peer_lost:
                    return
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        except OSError:
            pass  # the peer was faster
        finally:
            self._descriptors.leave()

    def _release(self) -> None:
        self._shutdown(socket.SHUT_RDWR)
        self._fail_queued()
        self._inbox.stop()
        self._watch.close()
        self._descriptors.retire()

    def _join_threads(self) -> None:
        for thread in (*(queue.thread for queue in self._queues), *self._inbox.threads):
            if thread is not None and thread is not threading.current_thread():
                thread.join(1.0)

    def _close_sockets(self) -> None:
        for sock in self._socks:
            sock.close()
        self._control.close()

    def _on_peer_gone(self) -> None:
        # Bytes in the kernel can still be received: the connections end only after them.
        self._stop_data(socket.SHUT_RDWR)

    _on_failure = _on_peer_gone

    def _sending_lost(self, error: OSError) -> None:
        """A connection accepts nothing more. Messages that the peer sent before are kept."""
        self._lifecycle.lose_peer(f"the connection broke while sending: {error.strerror or error}")
        # Stop the other connections too: the caller may overwrite tensors whose transfers fail now.
        self._stop_data(socket.SHUT_WR)

    def _stop_data(self, how: int) -> None:
        if self._descriptors.enter():
            self._shutdown(how)
            self._descriptors.leave()
        self._fail_queued()

    def _shutdown(self, how: int) -> None:
        """Wake threads that are sending or receiving; what the kernel already has can still be read."""
        for sock in self._socks:
            with contextlib.suppress(OSError):  # the peer was faster
                sock.shutdown(how)

    def _fail_queued(self) -> None:
        """Fail everything queued with the reason of the pipe's end; end writers and waiting senders."""
        with self._lock:
            lost = {id(s.message): s.message for queue in self._queues for s in queue.shares}
            for queue in self._queues:
                queue.shares.clear()
                queue.changed.notify_all()
            self._window.end()
        interrupted: BaseException | None = None
        for message in lost.values():
            try:
                message.transfer.fail(self._lifecycle.error())
            except BaseException as e:  # Ctrl-C, or of a callback; the other transfers must fail, too
                interrupted = e
        if interrupted is not None:
            raise interrupted


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def _tune(sock: socket.socket, buffer_bytes: int) -> None:
    if _is_tcp(sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not buffer_bytes and sock.getpeername()[0] in ("127.0.0.1", "::1"):
            buffer_bytes = _LOOPBACK_TCP_BUFFER_BYTES
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def _send_now(sock: socket.socket, views: Sequence[memoryview]) -> int:
    """Send as much as the kernel accepts without waiting; returns the bytes sent, maybe 0."""
    try:
        return sock.sendmsg(views, (), _NOT_NOW)
    except BlockingIOError:
        return 0


def _give(sock: socket.socket, batch: list[_Share]) -> int:
    """Give the kernel as much of the batch as it takes at once, else wait until it has the first share.

    A call that waits returns when the kernel has all that the call was given. The peer may have received the
    first share long before that, and must not have to receive the next ones for the first to count as sent.
    """
    taken = _send_now(sock, [view for share in batch for view in share.views]) if len(batch) > 1 else 0
    return taken or sock.sendmsg(batch[0].views, (), _NO_SIGNAL)


def _undelivered(sock: socket.socket) -> int:
    """Bytes that the peer's kernel has not acknowledged; always 0 on Unix sockets.

    A TCP socket that is closed with unread bytes in it resets the connection, and bytes that the other side's
    kernel has not received by then are lost.
    """
    if not _is_tcp(sock) or not sys.platform.startswith("linux"):
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, _SIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0
