"""The sending half of a pipe: the queue, the threads that send it, and when the caller has to wait.

A message is first sent in the caller's own thread, without waiting: a small one is sent before another thread
would have woken up. What the kernel does not accept at once is left to one writer thread per data connection,
started when first needed. An idle writer sleeps on a condition.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.net.wire.tensors import memory_of
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    DescriptorGuard,
    Lifecycle,
    PartialMessage,
    SendWindow,
    Transfer,
)
from kvplug_cpu.data_connection import SPLIT, DataConnection, parts

if TYPE_CHECKING:
    from torch import Tensor

_BATCH_BYTES = 256 * 1024
_BATCH_VIEWS = 64


class _Message:
    __slots__ = ("cost", "shares_left", "transfer")

    def __init__(self, nbytes: int, shares: int, cost: int) -> None:
        self.cost = cost
        self.shares_left = shares
        self.transfer = Transfer(nbytes)


class _Share:
    """The part of one message that goes over one data connection. Its views keep the tensor alive."""

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
    def __init__(self, connection: DataConnection, lock: threading.RLock) -> None:
        self.connection = connection
        self.shares: deque[_Share] = deque()
        self.changed = threading.Condition(lock)
        self.thread: threading.Thread | None = None


class Outbox:
    """``lost(reason)``: a connection accepts nothing more. ``fail(reason)``: the stream's position is lost.

    Both are called without locks. ``stop()`` ends the pipe at once, when the program leaves.
    """

    def __init__(
        self,
        connections: list[DataConnection],
        *,
        peer: str,
        limit: int,
        split_bytes: int,
        lifecycle: Lifecycle,
        descriptors: DescriptorGuard,
        lost: Callable[[str], None],
        fail: Callable[[str], None],
        stop: Callable[[], None],
    ) -> None:
        self._split_bytes = split_bytes
        self._lifecycle = lifecycle
        self._descriptors = descriptors
        self._lost = lost
        self._fail = fail
        self._stop = stop
        self._window = SendWindow(limit=limit, peer=peer, lifecycle=lifecycle)
        self._lock = self._window.lock
        self._queues = [_Queue(each, self._lock) for each in connections]

    def send(self, tensor: Tensor | None, deadline: Deadline) -> Transfer:
        """Only one thread at a time. Raises as ``Pipe.send_tensor``."""
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
                    share.advance(queue.connection.send_now(share.views) if share.nbytes else 0)
        except OSError as e:
            self._broken(e)
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

    def drain(self, deadline: Deadline) -> bool:
        """As :meth:`SendWindow.drain`."""
        return self._window.drain(deadline)

    def fail(self) -> None:
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

    def join(self) -> None:
        """Wait until the writers have ended, after ``fail`` and after the connections were stopped."""
        for queue in self._queues:
            thread = queue.thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(1.0)

    def _wake(self, queue: _Queue) -> None:
        if queue.thread is None:
            if not self._descriptors.enter():
                return
            index = self._queues.index(queue)
            thread = BackgroundThread(
                self._write, args=(queue,), name=f"kvplug-cpu-send-{index}", stop=self._stop
            )
            try:
                thread.start()
            except Exception:  # after Ctrl-C the thread may run, and leave itself
                self._descriptors.leave()
                raise
            queue.thread = thread
        else:
            queue.changed.notify()

    def _write(self, queue: _Queue) -> None:
        try:
            while batch := self._next_batch(queue):
                self._sent(queue, batch, _give(queue.connection, batch))
                del batch  # do not keep the sent memory alive while waiting for more
        except OSError as e:
            self._broken(e)
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

    def _broken(self, error: OSError) -> None:
        """A connection refused bytes: the peer is gone, or closed. What it sent before can still be read."""
        self._lost(f"the connection broke while sending: {error.strerror or error}")


def _give(connection: DataConnection, batch: list[_Share]) -> int:
    """Give the kernel as much of the batch as it takes at once, else wait until it has the first share.

    A call that waits returns when the kernel has all that the call was given. The peer may have received the
    first share long before that, and must not have to receive the next ones for the first to count as sent.
    """
    taken = 0
    if len(batch) > 1:
        taken = connection.send_now([view for share in batch for view in share.views])
    return taken or connection.send(batch[0].views)
