"""Pipes between two threads, whose ends a test can hold up, and write to."""

from __future__ import annotations

import threading
from collections import deque

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BusyError,
    Deadline,
    MessageLimit,
    Pipe,
    TensorMismatchError,
    Transfer,
)


class Direction:
    """What one end of a pair of threads' pipes has sent and the other has not received."""

    def __init__(self, limit):
        self.changed = threading.Condition()
        self.limit = limit
        self.queue = deque()
        self.error = None
        self.num_received = 0

    def break_with(self, error):
        with self.changed:
            if self.error is None:
                self.error = error
            dropped, self.queue = list(self.queue), deque()
            self.changed.notify_all()
        for _, transfer in dropped:
            transfer.fail(error)


class ThreadPipe(Pipe):
    """One end of a pair in one process. A transfer is done when the other end has received it."""

    def __init__(self, outgoing, incoming):
        self.outgoing, self.incoming = outgoing, incoming
        self.is_closed = False
        self.sending, self.receiving = threading.Lock(), threading.Lock()
        self.limit = MessageLimit()

    @property
    def closed(self):
        return self.is_closed

    @property
    def peer(self):
        return "another thread"

    def _check(self, direction):
        if self.is_closed:
            raise ClosedError("closed")
        if direction.error is not None:
            raise direction.error

    def send_tensor(self, tensor, *, timeout=DEFAULT_TIMEOUT):
        if not self.sending.acquire(blocking=False):
            raise BusyError("two threads send")
        try:
            deadline, to = Deadline.after(timeout, 10), self.outgoing
            nbytes = 0 if tensor is None else tensor.nbytes
            transfer = Transfer(nbytes)
            with to.changed:
                self._check(to)
                while to.queue and sum(t.nbytes for _, t in to.queue) + nbytes > to.limit:
                    if deadline.expired:
                        raise TimeoutError("no room")
                    to.changed.wait(deadline.remaining())
                    self._check(to)
                to.queue.append((tensor, transfer))
                to.changed.notify_all()
            return transfer
        finally:
            self.sending.release()

    def recv_tensor(self, out=None, *, timeout=DEFAULT_TIMEOUT):
        if not self.receiving.acquire(blocking=False):
            raise BusyError("two threads receive")
        try:
            deadline, source = Deadline.after(timeout, 10), self.incoming
            with source.changed:
                while not source.queue:
                    self._check(source)
                    if deadline.expired:
                        raise TimeoutError("nothing came")
                    source.changed.wait(deadline.remaining())
                if self.is_closed:
                    raise ClosedError("closed")
                tensor, transfer = source.queue[0]
                if out is not None and (
                    tensor is None or tensor.shape != out.shape or tensor.dtype != out.dtype
                ):
                    raise TensorMismatchError("does not fit")
                if out is None and tensor is not None:
                    self.limit.check(tensor.nbytes, self.peer)
                source.queue.popleft()
                source.num_received += 1
                source.changed.notify_all()
            got = tensor
            if tensor is not None:
                got = tensor.clone() if out is None else out.copy_(tensor)
            transfer.finish()
            return got
        finally:
            self.receiving.release()

    def limit_messages(self, nbytes):
        self.limit.lower(nbytes)

    def close(self, timeout=DEFAULT_TIMEOUT):
        deadline = Deadline.after(timeout, 10)
        with self.outgoing.changed:
            while self.outgoing.queue and self.outgoing.error is None and not deadline.expired:
                self.outgoing.changed.wait(deadline.remaining())
        self.abort()

    def abort(self):
        self.is_closed = True
        for direction in (self.outgoing, self.incoming):
            direction.break_with(PeerGoneError("the other thread has closed"))


def thread_pipes(limit=1 << 20):
    there, back = Direction(limit), Direction(limit)
    return ThreadPipe(there, back), ThreadPipe(back, there)
