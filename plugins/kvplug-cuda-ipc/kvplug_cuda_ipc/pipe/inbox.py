"""The receiving half of a pipe: copies pieces from the peer's memory to where their message belongs.

The caller's own thread enqueues the copies, and returns when the host has seen that they are done. No copy
that would have to wait is enqueued: the caller's memory is written only once its stream is done with it. So
the caller's memory is soon its own again, however a call ends. A message that is interrupted by a deadline
keeps its place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvplug import PeerGoneError, TimeoutError, TransportError
from kvplug.net.wire import TensorMeta
from kvplug.transport import Deadline, Lifecycle, MessageLimit, PartialMessage
from kvplug_cuda_ipc.backoff import Backoff
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.cudart.library import Event
from kvplug_cuda_ipc.device import Device, Stream
from kvplug_cuda_ipc.memory import Mapping
from kvplug_cuda_ipc.pipe.content import Runs, Target
from kvplug_cuda_ipc.pipe.frames import meta_of_prefix
from kvplug_cuda_ipc.pipe.pieces import AnnouncedPieces

if TYPE_CHECKING:
    from torch import Tensor

_COPY_S: Final = 5.0
"""Seconds that a call waits at its end for copies under way. They wait for nothing, so they take longer only
on a device that hangs."""


class _Message(PartialMessage):
    __slots__ = ()

    @property
    def complete(self) -> bool:
        """All of it lies in memory of this end's, so the peer's memory is not needed for it."""
        return self.own is not None and self.got == self.nbytes


class Inbox:
    """``taken(count)`` tells the peer; ``fail_pipe(reason)``, called without locks, ends the pipe."""

    def __init__(
        self,
        pieces: AnnouncedPieces,
        mapping: Mapping,
        device: Device,
        stream: Stream,
        *,
        peer: str,
        message_limit: MessageLimit,
        lifecycle: Lifecycle,
        taken: Callable[[int], None],
        fail_pipe: Callable[[str], None],
    ) -> None:
        self._pieces = pieces
        self._mapping = mapping
        self._device = device
        self._stream = stream
        self._peer = peer
        self._limit = message_limit
        self._lifecycle = lifecycle
        self._taken = taken
        self._fail_pipe = fail_pipe
        self._message: _Message | None = None
        self._hung: list[object] = []
        """Memory that a device which hangs may still write to: the pipe keeps it."""
        self._reading = threading.Lock()
        """Held while the peer's memory is in use."""

    def receive(self, target: Target, deadline: Deadline) -> Tensor | None:
        """Only one thread at a time, whose current device is the pipe's. Raises as ``Pipe.recv_tensor``."""
        message = self._message or self._announced(deadline)
        target.check(message.meta)
        with self._reading:
            if not message.complete:
                self._pieces.check()
            self._message = message
            if message.nbytes:
                in_place = self._fill(message, target, deadline)
                value = target.value(None if in_place else message.own)
            else:
                value = target.value(None if message.meta is None else self._allocate(message.meta))
                self._take_empty()
            self._message = None
            return value

    def unmap(self, deadline: Deadline) -> None:
        """Give up the peer's memory, once no call uses it. For the pipe's worker, at the end.

        Until the deadline it waits for messages that a peer which has closed the pipe left behind.

        Raises:
            CudaError: it could not be unmapped.
        """
        self._pieces.wait_until_taken(deadline)
        with self._reading:
            if self._message is not None and not self._message.complete:
                self._message = None
            self._mapping.close()

    def _announced(self, deadline: Deadline) -> _Message:
        piece = self._pieces.oldest(deadline)
        if piece is None:
            raise TimeoutError(f"no message has arrived from {self._peer}; it is alive as far as can be seen")
        return _Message(meta_of_prefix(piece.prefix))

    def _allocate(self, meta: TensorMeta) -> Tensor:
        return self._device.empty(meta, self._stream)

    def _fill(self, message: _Message, target: Target, deadline: Deadline) -> bool:
        """Copy all that is left of it. Whether it went into the caller's memory."""
        runs = target.runs() if message.own is None else None
        in_place = runs is not None
        if runs is None:
            if message.own is None:
                assert message.meta is not None
                self._limit.check(message.nbytes, self._peer)
                message.own = self._allocate(message.meta)
            runs = Runs([message.own])
        copies = _Copies(
            message,
            runs,
            writable=target.ready() if in_place else None,
            pieces=self._pieces,
            mapping=self._mapping,
            device=self._device,
            stream=self._stream,
            take=self._take,
        )
        try:
            whole = copies.run(deadline)
            if not whole and in_place and message.got:
                self._keep(message, runs)
        except PeerGoneError:
            self._message = None  # its last copies may have ended since, but the pipe ended before they did
            raise
        except BaseException as e:
            if copies.under_way:
                self._hung.append(copies)
            if not self._lifecycle.ended:
                self._fail_pipe(f"{PartialMessage.INTERRUPTED}: {e!r}")
            raise
        if not whole:
            raise message.late(self._peer)
        return in_place

    def _keep(self, message: _Message, runs: Runs) -> None:
        """Copy what has arrived out of the caller's memory, which is the caller's again after this."""
        own = message.allocate_own(self._allocate, self._fail_pipe)
        to, runtime, stream = own.data_ptr(), self._device.runtime, self._stream.handle
        for address, length in runs.parts(0, message.got):
            runtime.memcpy_async(to, address, length, stream)
            to += length
        if not _wait(runtime.event(stream)):
            self._hung.append((own, runs))
            raise TransportError("a copy on the device does not end")
        message.own = own

    def _take_empty(self) -> None:
        try:
            self._take(1)
        except BaseException as e:  # Ctrl-C: the peer may or may not have been told
            self._fail_pipe(f"{PartialMessage.INTERRUPTED}: {e!r}")
            raise

    def _take(self, count: int) -> None:
        self._pieces.take(count)
        self._taken(count)


class _Copies:
    """The copies of one message's pieces, several of them under way at a time."""

    def __init__(
        self,
        message: PartialMessage,
        runs: Runs,
        *,
        writable: Event | None,
        pieces: AnnouncedPieces,
        mapping: Mapping,
        device: Device,
        stream: Stream,
        take: Callable[[int], None],
    ) -> None:
        """Into ``runs``, once ``writable`` has happened. ``take(count)``: so many pieces were copied."""
        self._message = message
        self._runs = runs
        self._writable = writable
        self._pieces = pieces
        self._mapping = mapping
        self._device = device
        self._stream = stream
        self._take = take
        self._enqueued = message.got
        """Bytes of the message that were copied, or whose copy is under way."""
        self.under_way: deque[tuple[int, Event]] = deque()
        """(bytes, when they are copied) of each piece; empty after :meth:`run`, unless the device hangs."""

    def run(self, deadline: Deadline) -> bool:
        """Copy all that is left; False at the deadline, when ``message.got`` says how much was copied.

        However it ends, the memory is not written to after it, unless it raises that a copy does not end.
        """
        message, backoff = self._message, Backoff()
        try:
            while message.got < message.nbytes:
                self._pieces.check()
                if self._finish() or self._enqueue():
                    backoff.reset()
                elif deadline.expired:
                    break
                elif self.under_way or not self._is_writable():
                    backoff.pause()
                else:
                    self._pieces.oldest(deadline)  # waits for one
        finally:
            self._finish_all()
        return message.got == message.nbytes

    def _is_writable(self) -> bool:
        if self._writable is not None and self._writable.is_done():
            self._writable = None
        return self._writable is None

    def _enqueue(self) -> bool:
        """Enqueue the copies of the pieces that have come. Whether there were any."""
        if not self._is_writable():
            return False
        runtime, stream = self._device.runtime, self._stream.handle
        before = self._enqueued
        for piece in self._pieces.after(len(self.under_way)):
            if self._enqueued == self._message.nbytes:
                break  # it is of the next message
            source = self._mapping.address + piece.offset
            for address, length in self._runs.parts(self._enqueued, piece.nbytes):
                runtime.memcpy_async(address, source, length, stream)
                source += length
            self._enqueued += piece.nbytes
            self.under_way.append((piece.nbytes, runtime.event(stream)))
        return self._enqueued > before

    def _finish(self) -> bool:
        """Whether a copy has ended since the last look."""
        count = 0
        while self.under_way and self.under_way[0][1].is_done():
            nbytes, _ = self.under_way.popleft()
            self._message.got += nbytes
            count += 1
        if count:
            self._take(count)
        return count > 0

    def _finish_all(self) -> None:
        """Wait for the copies under way. They wait for nothing, so a deadline need not be looked at."""
        if self.under_way:
            if not _wait(self.under_way[-1][1]):
                raise TransportError(
                    "a copy on the device does not end: the memory that was given may still be written to"
                )
            self._finish()


def _wait(event: Event) -> bool:
    """Whether it happens soon."""
    deadline, backoff = Deadline.after(_COPY_S), Backoff()
    try:
        while not event.is_done():
            if deadline.expired:
                return False
            backoff.pause()
    except CudaError:
        return True  # the device has failed, and writes nothing more
    return True
