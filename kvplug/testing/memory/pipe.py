"""The pipe "memory": two inboxes in one process. Sending copies the tensor into the other end's inbox."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvplug.context import PipeContext
from kvplug.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.errors import ClosedError, PeerGoneError, TensorMismatchError, TimeoutError, WireError
from kvplug.fork import close_after_fork
from kvplug.pipe import Pipe, PipeEndpoint, PipeListener, Transfer, Turn
from kvplug.wire.tensors import copy_into, empty_like_meta, memory_of, meta_of

if TYPE_CHECKING:
    from torch import Tensor

_listeners: Final[dict[str, MemoryListener]] = {}
_numbers = itertools.count(1)
_EMPTY_NBYTES = 64
"""What a message without content counts for, so that those do not pile up without bound either."""


class MemoryEndpoint(PipeEndpoint):
    """The factory of the spec."""

    def __init__(self, context: PipeContext) -> None:
        self._context = context

    def make_pipe(self) -> MemoryPipe:
        return MemoryPipe(self._context)

    def listen(self) -> PipeListener:
        return MemoryListener(self._context, self.make_pipe)

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        Deadline.after(timeout)  # refuses what is no timeout; there is nothing to wait for
        if not contact.startswith("memory:"):
            raise WireError('this is no contact of the pipe "memory", which begins with memory:')
        listener = _listeners.get(contact)
        if listener is None:
            raise PeerGoneError(f"nobody listens at {contact} in this process (any more)")
        return listener.join(self.make_pipe())


class MemoryListener(PipeListener):
    """A name in this process, and the pipes that wait to be accepted."""

    def __init__(self, context: PipeContext, make_pipe: Callable[[], MemoryPipe]) -> None:
        self._timeout_s = context.timeout_s
        self._make_pipe = make_pipe
        self._contact = f"memory:{next(_numbers)}"
        self._changed = threading.Condition()
        self._waiting: deque[MemoryPipe] = deque()
        self._closed = False
        _listeners[self._contact] = self
        close_after_fork(self)

    @property
    def contact(self) -> str:
        return self._contact

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting or self._closed, deadline.remaining()):
                raise TimeoutError(f"nobody connected to {self._contact} in time")
            if self._closed:
                raise ClosedError(f"the listener at {self._contact} is closed")
            return self._waiting.popleft()

    def join(self, near: MemoryPipe) -> Pipe:
        """For ``connect``: the two are a pair from now on; the other end waits for ``accept``."""
        far = self._make_pipe()
        near.meet(far)
        far.meet(near)
        with self._changed:
            if self._closed:
                raise PeerGoneError(f"nobody listens at {self._contact} any more")
            self._waiting.append(far)
            self._changed.notify_all()
        return near

    def close(self) -> None:
        _listeners.pop(self._contact, None)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            unwanted, self._waiting = self._waiting, deque()
        for pipe in unwanted:
            pipe.abort()

    def _after_fork_in_child(self) -> None:
        _listeners.pop(self._contact, None)
        self._changed = threading.Condition()  # the old one may be held by a thread that is not here
        self._closed = True


class MemoryPipe(Pipe):
    """One end: an inbox, which the other end fills up to its own limit."""

    def __init__(self, context: PipeContext) -> None:
        self._limit: int = context.options.max_in_flight_bytes
        self._timeout_s = context.timeout_s
        self._changed = (
            threading.Condition()
        )  # guards the inbox and how it ended; never held together with the peer's
        self._inbox: deque[Tensor | None] = deque()
        self._held = 0  # bytes in the inbox
        self._closed = False
        self._peer_ended = False
        self._sending, self._receiving = Turn("sending"), Turn("receiving")
        self._other: MemoryPipe
        close_after_fork(self)

    def meet(self, other: MemoryPipe) -> None:
        """For the listener: this is the other end."""
        self._other = other

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def peer(self) -> str:
        return "the other end of a pipe in this process"

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        deadline = Deadline.after(timeout, self._timeout_s)
        message = _copy(tensor)
        transfer = Transfer(_nbytes(message))
        with self._sending.taken():
            self._check_open()
            self._other.deliver(message, self._limit, deadline, sender=self)
        transfer.finish()  # the content has been copied: the caller may overwrite the tensor
        return transfer

    def deliver(self, message: Tensor | None, limit: int, deadline: Deadline, sender: MemoryPipe) -> None:
        """For the other end: put a message into this end's inbox, as soon as there is room."""
        nbytes = max(_EMPTY_NBYTES, _nbytes(message))
        with self._changed:
            while self._inbox and self._held + nbytes > limit and not (self._closed or sender.closed):
                if not self._changed.wait(deadline.remaining()):
                    raise TimeoutError(
                        f"{self._held} bytes sent earlier were not received in time, and"
                        f" max_in_flight_bytes is {limit}; nothing was queued"
                    )
            sender._check_open()
            if self._closed:
                raise PeerGoneError(f"{sender.peer} is gone")
            self._inbox.append(message)
            self._held += nbytes
            self._changed.notify_all()

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._receiving.taken(), self._changed:
            ended = lambda: self._inbox or self._closed or self._peer_ended  # noqa: E731
            arrived = self._changed.wait_for(ended, deadline.remaining())
            self._check_open()
            if not arrived:
                raise TimeoutError(f"nothing came from {self.peer} in time")
            if not self._inbox:
                raise PeerGoneError(f"{self.peer} is gone")
            message = self._inbox[0]
            received = message if out is None else _fill(out, message)
            self._inbox.popleft()
            self._held -= max(_EMPTY_NBYTES, _nbytes(message))
            self._changed.notify_all()
            return received

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        Deadline.after(timeout)
        self.abort()  # what was sent lies in the other end's inbox already

    def abort(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._inbox.clear()
            self._changed.notify_all()
        self._other.lose_peer()

    def lose_peer(self) -> None:
        """For the other end: it has ended. What it sent before can still be received."""
        with self._changed:
            self._peer_ended = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the pipe to {self.peer} is closed")

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()
        self._sending, self._receiving = Turn("sending"), Turn("receiving")
        self._closed = True
        self._inbox.clear()


def _copy(tensor: Tensor | None) -> Tensor | None:
    """Of the same shape, dtype and bits, and contiguous. Refuses what is not carried."""
    if tensor is None:
        return None
    copy = empty_like_meta(meta_of(tensor))
    copy_into(copy, memory_of(tensor))
    return copy


def _nbytes(message: Tensor | None) -> int:
    return 0 if message is None else meta_of(message).nbytes


def _fill(out: Tensor, message: Tensor | None) -> Tensor:
    if message is None:
        raise TensorMismatchError("the next message is None, and out was given")
    if meta_of(out) != meta_of(message):
        raise TensorMismatchError(f"the next message is {meta_of(message)}, and out is {meta_of(out)}")
    copy_into(out, memory_of(message))
    return out
