"""The pipe "memory": each end has a list of the messages that the other end in this process has not received.

With the option ``eager``, the default, a tensor is copied when it is sent, and its transfer is done at once.
Without it, the tensor is copied when the message is received, and the transfer ends only then, as with a
device that reads the sender's memory. This finds code that overwrites a tensor too early.

Tensors of the simulated device are copied to the CPU when they are sent, and back when they are received.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.net.wire import TensorMeta, copy_into, empty_like_meta, memory_of, meta_of
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    DeviceMark,
    DuplexPipe,
    Pipe,
    PipeEndpoint,
    PipeListener,
    SendWindow,
    TensorMismatchError,
    Timeout,
    Transfer,
    WireError,
    close_after_fork,
)

if TYPE_CHECKING:
    from torch import Tensor

_listeners: Final[dict[str, MemoryListener]] = {}
_numbers = itertools.count(1)


class MemoryEndpoint(PipeEndpoint):
    """The factory of the spec."""

    def __init__(self, context: PipeEndpoint.Context) -> None:
        self._context = context

    def make_pipe(self) -> MemoryPipe:
        return MemoryPipe(self._context)

    def listen(self) -> PipeListener:
        return MemoryListener(self._context.timeout_s)

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        Deadline.after(timeout)  # checks the timeout; there is nothing to wait for
        listener, local, remote = listener_at(contact), self.make_pipe(), self.make_pipe()
        local.meet(remote)
        listener.offer(remote)
        return local


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
    """A name in this process, and the pipes to accept."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._contact = f"memory:{next(_numbers)}"
        self._changed = threading.Condition()
        self._waiting: list[Pipe] = []
        self._closed = False
        _listeners[self._contact] = self
        close_after_fork(self)

    @property
    def contact(self) -> str:
        return self._contact

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, deadline.remaining())
            if self._closed:
                raise ClosedError(f"the listener at {self._contact} is closed")
            if not self._waiting:
                raise TimeoutError(f"no peer connected to {self._contact} in time")
            return self._waiting.pop(0)

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
        for pipe in self._waiting:
            pipe.abort()

    def _after_fork_in_child(self) -> None:
        self._closed = True


class PipeMessage(NamedTuple):
    """A message that has been sent."""

    meta: TensorMeta | None
    """``None`` is a message too."""
    memory: memoryview
    """Its bytes: a copy, or the sender's memory, which this keeps alive."""
    transfer: Transfer

    @classmethod
    def of(cls, tensor: Tensor | None, *, eager: bool) -> PipeMessage:
        """A message with this tensor. Raises for unsupported tensors."""
        meta = None if tensor is None else meta_of(tensor)
        memory = memoryview(b"") if tensor is None else memory_of(tensor)
        message = cls(meta, memoryview(bytes(memory)) if eager else memory, Transfer(memory.nbytes))
        if eager:
            message.transfer.finish()  # the caller may overwrite the tensor
        return message


class MemoryPipe(DuplexPipe):
    """One end. Its window guards the messages that it has sent, and wakes the ends that wait for a change."""

    def __init__(self, context: PipeEndpoint.Context) -> None:
        super().__init__("the other end of a pipe in this process", self.Settings.of(context))
        self._device = context.device
        self._eager: bool = context.options.eager
        most = context.options.max_in_flight_bytes
        self._window = SendWindow(limit=most, peer=self._peer, lifecycle=self._lifecycle)
        self._sent: deque[PipeMessage] = deque()
        """The messages that the other end has not received."""
        self._other = self

    def meet(self, other: MemoryPipe) -> None:
        """Connect the two ends."""
        self._other, other._other = other, self

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        deadline = self._deadline(timeout)
        message = PipeMessage.of(self._on_the_cpu(tensor, deadline), eager=self._eager)
        self._queue(message, deadline)
        return message.transfer

    def _on_the_cpu(self, tensor: Tensor | None, deadline: Deadline) -> Tensor | None:
        """The tensor; of the simulated device a copy, made when the caller's stream has written it."""
        device = getattr(tensor, "device", None)
        if tensor is None or device is None or device.type != "simulated":
            return tensor
        mark = DeviceMark(device)
        while not mark.is_passed:
            self._check_sending()
            if deadline.expired:
                raise TimeoutError(f"{device} has not written the tensor in time; nothing was queued")
            time.sleep(0.001)
        return tensor.cpu()

    def _queue(self, message: PipeMessage, deadline: Deadline) -> None:
        """Let the other end receive a message, as soon as there is room."""
        window = self._window
        with window.lock:
            window.wait_for_room(message.memory.nbytes, deadline)
            self._sent.append(message)
            window.add(window.cost(message.memory.nbytes))
            window.room.notify_all()

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        deadline = self._deadline(timeout)
        window = self._other._window
        with window.lock:
            while not self._other._sent:
                if self._lifecycle.ended:
                    raise self._lifecycle.error()
                if not window.room.wait(deadline.remaining()) and deadline.expired:
                    raise TimeoutError(f"nothing came from {self.peer} in time")
            self._check_receiving()
            message = self._other._sent[0]
            received = self._copied(message, out)
            self._other._sent.popleft()
            window.settle(window.cost(message.memory.nbytes))
        message.transfer.finish()  # without the lock: it runs callbacks of the sender
        return received

    def _copied(self, message: PipeMessage, out: Tensor | None) -> Tensor | None:
        """The message in ``out``, or in a new tensor. Raises for one that does not fit."""
        if message.meta is None:
            if out is not None:
                raise TensorMismatchError("the next message is None, and out was given")
            return None
        if out is None:
            self._limit.check(message.memory.nbytes, self.peer)
        elif meta_of(out) != message.meta:
            raise TensorMismatchError(f"the next message is {message.meta}, and out is {meta_of(out)}")
        received = out if out is not None and out.is_cpu else empty_like_meta(message.meta)
        copy_into(received, message.memory)
        if out is None:
            return received.to(self._device)
        return out if received is out else out.copy_(received)  # queued on the caller's stream

    def _drain(self, deadline: Deadline) -> None:
        self._other._lifecycle.lose_peer(DuplexPipe.Lifecycle.CLOSED_BY_PEER)
        with self._other._window.lock:
            self._other._window.room.notify_all()  # wakes the receiver here, and the sender there
        if not self._eager:
            self._window.drain(deadline)

    def _release(self) -> None:
        """End both ways. What was copied when it was sent can still be received."""
        self._other._lifecycle.lose_peer("it was aborted")
        for sender in (self, self._other):
            with sender._window.lock:
                sender._window.end()
                unsent = [message for message in sender._sent if not message.transfer.done()]
                sender._sent = deque(message for message in sender._sent if message.transfer.done())
            for message in unsent:
                message.transfer.fail(sender._lifecycle.error())

    def _release_in_child(self) -> None:
        self._sent.clear()
