from __future__ import annotations

import threading
import time
from collections import deque

import pytest
import torch

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.transport import DEFAULT_TIMEOUT, BusyError, Deadline, Pipe, TensorMismatchError, Transfer
from kvplug_lookup.reach import ReachingEnd
from kvplug_lookup.store import SimpleStore


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


class Joined:
    """A store, and reaching ends on pipes of threads."""

    def __init__(self):
        self.things = []

    def store(self, buffer_size=1 << 30, **options):
        store = SimpleStore(buffer_size=buffer_size, timeout_s=options.pop("timeout_s", 10), **options)
        self.things.append(store)
        return store

    def reach(self, store, *, limit=1 << 20, timeout_s=10):
        ours_signal, theirs_signal = thread_pipes()
        ours_data, theirs_data = thread_pipes(limit)
        store.attach(theirs_signal, theirs_data)
        end = ReachingEnd(ours_signal, ours_data, timeout_s=timeout_s)
        end.pipes = (ours_signal, ours_data)
        self.things.append(end)
        return end


@pytest.fixture
def joined():
    before = set(threading.enumerate())
    joined = Joined()
    yield joined
    for thing in reversed(joined.things):
        thing.abort()
    until = time.monotonic() + 5
    while left := [t.name for t in set(threading.enumerate()) - before if t.name.startswith("kvplug-")]:
        assert time.monotonic() < until, f"threads left behind: {left}"
        time.sleep(0.005)


@pytest.fixture
def entry():
    """Makes (tokens, roi, key, value, hidden) that tell one entry from another by its contents."""

    def make(tokens, *, roi=None, layers=2, heads=2, size=4, dtype=torch.float32, hidden=True):
        n = len(tokens)
        base = torch.arange(layers * n * heads * size).reshape(layers, n, heads, size) % 97 + sum(tokens) % 89
        last = torch.arange(n * 6).reshape(n, 6).to(dtype) if hidden else None
        return list(tokens), roi, base.to(dtype), (base + 1).to(dtype), last

    return make


@pytest.fixture
def started():
    """Runs functions in threads and hands back what they return or raise."""

    class Started:
        def __init__(self, function, args, kwargs):
            self.outcome = None

            def run():
                try:
                    self.outcome = (function(*args, **kwargs), None)
                except BaseException as e:
                    self.outcome = (None, e)

            self.thread = threading.Thread(target=run, daemon=True)
            self.thread.start()

        def result(self, timeout=10):
            self.thread.join(timeout)
            assert self.outcome is not None, "still running"
            if self.outcome[1] is not None:
                raise self.outcome[1]
            return self.outcome[0]

        def is_waiting(self, for_s=0.1):
            self.thread.join(for_s)
            return self.outcome is None

    return lambda function, *args, **kwargs: Started(function, args, kwargs)


@pytest.fixture
def eventually():
    def wait(condition, timeout=5):
        until = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < until, "it did not happen"
            time.sleep(0.002)

    return wait
