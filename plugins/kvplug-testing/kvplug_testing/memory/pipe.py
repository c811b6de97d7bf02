"""The pipe "memory": two inboxes in one process. Sending puts a message into the other end's inbox.

With the option ``eager``, the default, a tensor is copied when it is sent, and its transfer is done at once.
Without it, the tensor is copied when the message is received, and the transfer ends only then, as with a
device that reads the sender's memory. This finds code that overwrites a tensor too early.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import attrs

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.net.wire import TensorMeta, copy_into, empty_like_meta, memory_of, meta_of
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    ExclusiveUse,
    MessageLimit,
    NamedExhaustion,
    Pipe,
    PipeContext,
    PipeEndpoint,
    PipeListener,
    TensorMismatchError,
    Timeout,
    Transfer,
    WireError,
    close_after_fork,
    end_at_exit,
)

if TYPE_CHECKING:
    from torch import Tensor

_listeners: Final[dict[str, MemoryListener]] = {}
_numbers = itertools.count(1)
_EMPTY_NBYTES = 64
"""What an empty message counts for, so that the number of empty messages is limited too."""


class MemoryEndpoint(PipeEndpoint):
    """The factory of the spec."""

    def __init__(self, context: PipeContext) -> None:
        self._context = context

    def make_pipe(self) -> MemoryPipe:
        return MemoryPipe(self._context)

    def listen(self) -> PipeListener:
        return MemoryListener(self._context, self.make_pipe)

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        Deadline.after(timeout)  # checks the timeout; there is nothing to wait for
        return listener_at(contact).join(self.make_pipe())


def listener_at(contact: str) -> MemoryListener:
    """Raises:
    WireError: it is not a contact of such a listener. PeerGoneError: this process has no such listener.
    """
    if not contact.startswith("memory:"):
        raise WireError('a contact of the pipe "memory" begins with memory:')
    listener = _listeners.get(contact)
    if listener is None:
        raise PeerGoneError(f"no listener is at {contact} in this process")
    return listener


class MemoryListener(PipeListener):
    """A name in this process, and the queue of pipes to accept."""

    def __init__(self, context: PipeContext, make_pipe: Callable[[], MemoryPipe]) -> None:
        self._timeout_s = context.timeout_s
        self._make_pipe = make_pipe
        self._contact = f"memory:{next(_numbers)}"
        self._changed = threading.Condition()
        self._waiting: deque[Pipe] = deque()
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
                raise TimeoutError(f"no peer connected to {self._contact} in time")
            if self._closed:
                raise ClosedError(f"the listener at {self._contact} is closed")
            return self._waiting.popleft()

    def join(self, local: MemoryPipe) -> Pipe:
        """For ``connect``: make a pair with ``local``; the other end waits for ``accept``."""
        remote = self._make_pipe()
        local.meet(remote)
        remote.meet(local)
        self.offer(remote)
        return local

    def offer(self, pipe: Pipe) -> None:
        """Let ``accept`` return this pipe."""
        with self._changed:
            if self._closed:
                raise PeerGoneError(f"the listener at {self._contact} is closed")
            self._waiting.append(pipe)
            self._changed.notify_all()

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
        self._changed = threading.Condition()  # a thread of the parent may hold the old one
        self._closed = True


@attrs.frozen(eq=False)
class PipeMessage:
    """A message in an inbox."""

    meta: TensorMeta | None
    """``None`` is a message too."""
    memory: memoryview
    """Its bytes: a copy, or the sender's memory, which this keeps alive."""
    transfer: Transfer

    @classmethod
    @NamedExhaustion("sending a tensor")
    def of(cls, tensor: Tensor | None, *, eager: bool) -> PipeMessage:
        """A message with this tensor. Raises for unsupported tensors."""
        if tensor is None:
            meta, memory = None, memoryview(b"")
        else:
            meta, memory = meta_of(tensor), memory_of(tensor)
        transfer = Transfer(memory.nbytes)
        if eager:
            memory = memoryview(bytes(memory))
            transfer.finish()  # the caller may overwrite the tensor
        return cls(meta, memory, transfer)

    @property
    def cost(self) -> int:
        """The bytes that it counts for."""
        return max(_EMPTY_NBYTES, self.memory.nbytes)

    def put(self, out: Tensor | None, limit: MessageLimit, peer: str) -> Tensor | None:
        """Copy it into ``out``, or return it as a new tensor, if it is within the limit."""
        if self.meta is None:
            if out is not None:
                raise TensorMismatchError("the next message is None, and out was given")
            return None
        if out is None:
            limit.check(self.memory.nbytes, peer)
            out = empty_like_meta(self.meta)
        elif meta_of(out) != self.meta:
            raise TensorMismatchError(f"the next message is {self.meta}, and out is {meta_of(out)}")
        copy_into(out, self.memory)
        return out


class MemoryPipe(Pipe):
    """One end: an inbox, which the other end fills up to its own limit."""

    def __init__(self, context: PipeContext) -> None:
        self._limit: int = context.options.max_in_flight_bytes
        self._eager: bool = context.options.eager
        self._timeout_s = context.timeout_s
        self._message_limit = MessageLimit(context.max_message_bytes)
        # Guards the inbox and the flags; never held together with the peer's lock.
        self._changed = threading.Condition()
        self._inbox: deque[PipeMessage] = deque()
        self._held = 0  # bytes in the inbox
        self._closed = False  # at this end: calls are refused
        self._ended = False  # the other end knows
        self._peer_ended = False
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._other: MemoryPipe
        close_after_fork(self)
        end_at_exit(self)

    def meet(self, other: MemoryPipe) -> None:
        """For the listener: set the other end."""
        self._other = other

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def peer(self) -> str:
        return "the other end of a pipe in this process"

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._sending.taken():
            self._check_open()
            message = PipeMessage.of(tensor, eager=self._eager)
            self._other.deliver(message, self._limit, deadline, sender=self)
        return message.transfer

    def deliver(self, message: PipeMessage, limit: int, deadline: Deadline, sender: MemoryPipe) -> None:
        """For the other end: put a message into this end's inbox once there is room."""
        with self._changed:
            while self._inbox and self._held + message.cost > limit and not (self._closed or sender.closed):
                if not self._changed.wait(deadline.remaining()):
                    raise TimeoutError(
                        f"{self._held} bytes sent earlier were not received in time, and"
                        f" max_in_flight_bytes is {limit}; nothing was queued"
                    )
            sender._check_open()
            if self._closed:
                raise PeerGoneError(f"{sender.peer} is gone")
            self._inbox.append(message)
            self._held += message.cost
            self._changed.notify_all()

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._receiving.taken():
            with self._changed:
                ended = lambda: self._inbox or self._closed or self._peer_ended  # noqa: E731
                arrived = self._changed.wait_for(ended, deadline.remaining())
                self._check_open()
                if not arrived:
                    raise TimeoutError(f"nothing came from {self.peer} in time")
                if not self._inbox:
                    raise PeerGoneError(f"{self.peer} is gone")
                message = self._inbox[0]
                received = message.put(out, self._message_limit, self.peer)
                self._inbox.popleft()
                self._held -= message.cost
                self._changed.notify_all()
            message.transfer.finish()  # without the lock: it runs callbacks of the sender
        return received

    def limit_messages(self, nbytes: int) -> None:
        self._message_limit.lower(nbytes)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._other.drain(deadline)
        self.abort()

    def drain(self, deadline: Deadline) -> None:
        """For the other end: wait until the transfers of all messages in the inbox are done."""
        with self._changed:
            self._changed.notify_all()  # wakes a sender that waits for room
            over = lambda: self._ended or self._peer_ended or all(m.transfer.done() for m in self._inbox)  # noqa: E731
            self._changed.wait_for(over, deadline.remaining())

    def abort(self) -> None:
        with self._changed:
            if self._ended:
                return
            self._closed = self._ended = True
            unread, self._inbox = self._inbox, deque()
            self._changed.notify_all()
        for message in unread:
            message.transfer.fail(PeerGoneError(f"{self.peer} is gone"))
        self._other.lose_peer()

    def lose_peer(self) -> None:
        """For the other end: it has ended. Messages that it sent before can still be received."""
        with self._changed:
            self._peer_ended = True
            unsent = [message for message in self._inbox if not message.transfer.done()]
            self._inbox = deque(message for message in self._inbox if message.transfer.done())
            self._changed.notify_all()
        for message in unsent:
            message.transfer.fail(ClosedError(f"the pipe to {self.peer} is closed"))

    def _end_at_exit(self) -> None:
        if hasattr(self, "_other"):
            self.abort()

    def _is_in_use(self) -> bool:
        return self._sending.busy or self._receiving.busy

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the pipe to {self.peer} is closed")

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # a thread of the parent may hold the old one
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._closed = self._ended = True
        parents = ClosedError("it belongs to the process that this one was forked from")
        for message in self._inbox:
            message.transfer.after_fork(parents)
        self._inbox.clear()
