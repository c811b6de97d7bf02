"""The sending half of a pipe: what is queued, what is being copied, what the peer knows of.

    queued -> being copied -> copied, and told -> taken by the peer

The tensor is the caller's again when all of it was copied. The peer is told of a piece when this end's host
has seen that the copy is done: a GPU never waits for another process. Callers queue, and begin the copy if
there is room; everything else is done by the pipe's mover.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvplug import TimeoutError
from kvplug.transport import Deadline, Lifecycle, Transfer, WireError
from kvplug_cuda_ipc.cudart.library import Event
from kvplug_cuda_ipc.device import Device, Stream
from kvplug_cuda_ipc.memory import Ring, Staging
from kvplug_cuda_ipc.pipe.content import Content
from kvplug_cuda_ipc.pipe.words import WINDOW, Piece

_LOOK_S = 50e-6
_LOOK_BYTES = 256 * 1024
_SMALLEST_COST = 256
"""What an empty message counts for, so that a stopped receiver bounds their number too."""


class _Message:
    __slots__ = ("begun", "content", "cost", "transfer")

    def __init__(self, content: Content) -> None:
        self.content = content
        self.cost = max(_SMALLEST_COST, content.nbytes)
        self.transfer = Transfer(content.nbytes)
        self.begun = 0  # bytes

    @property
    def whole(self) -> bool:
        return self.begun == self.content.nbytes


class _Flight:
    """A piece: under way to staging memory, then in it."""

    __slots__ = ("event", "last", "message", "piece")

    def __init__(self, message: _Message, piece: Piece, event: Event | None) -> None:
        self.message = message
        self.piece = piece
        self.event = event
        self.last = message.whole


class Outbox:
    """``say`` tells the peer something, ``break_down`` ends the pipe and is called without locks."""

    def __init__(
        self,
        staging: Staging,
        device: Device,
        stream: Stream,
        *,
        peer: str,
        limit: int,
        piece_bytes: int,
        lifecycle: Lifecycle,
        say: Callable[[Any], None],
        break_down: Callable[[str], None],
    ) -> None:
        self._staging = staging
        self._device = device
        self._stream = stream
        self._peer = peer
        self._limit = limit
        self._piece_bytes = min(piece_bytes, staging.nbytes // 2)
        self._lifecycle = lifecycle
        self._say = say
        self._break_down = break_down
        self._ring = Ring(staging.nbytes)
        self._lock = (
            threading.RLock()
        )  # a signal's handler may abort the pipe while its own thread is in here
        self._room = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._queue: deque[_Message] = deque()
        """Not wholly begun."""
        self._copying: deque[_Flight] = deque()
        self._told: deque[_Flight] = deque()
        self._held: dict[int, _Message] = {}
        """By identity: whose transfer has not ended."""
        self._in_flight = 0
        self._ended = False

    # -- callers ---------------------------------------------------------------------------------------

    def send(self, content: Content, deadline: Deadline) -> Transfer:
        """Only one thread at a time, whose current device is ours. Raises as ``Pipe.send_tensor``."""
        queued = False
        try:
            with self._lock:
                message = _Message(content)
                self._wait_for_room(message, deadline)
                queued = True
                self._queue.append(message)
                self._held[id(message)] = message
                self._in_flight += message.cost
                self._begin()
            if content.nbytes <= _LOOK_BYTES:
                self._look_after(message)
            with self._lock:
                self._work.notify()
        except BaseException as e:
            if queued:  # Ctrl-C, or the device failed: nobody knows how far it got
                self._break_down(f"a message was not begun: {e!r}")
            raise
        return message.transfer

    def drain(self, deadline: Deadline) -> None:
        """Refuse whoever waits for room, then wait until all was taken, or it has ended."""
        with self._lock:
            self._room.notify_all()
            while self._in_flight and not self._ended:
                if not self._room.wait(deadline.remaining()) and deadline.expired:
                    return

    def end(self) -> None:
        """Nothing more is told; every transfer that has not ended fails with how it ended."""
        with self._lock:
            self._ended = True
            lost = list(self._held.values())
            self._held.clear()
            self._queue.clear()
            self._room.notify_all()
            self._work.notify_all()
        for message in lost:
            message.transfer.fail(self._lifecycle.error())

    def inherit(self) -> None:
        """This is a forked child: its parent's transfers end here too. Takes no lock."""
        self._ended = True
        for message in list(self._held.values()):
            message.transfer.after_fork(self._lifecycle.error())

    def _look_after(self, message: _Message) -> None:
        """A small message is soon copied: for a moment this thread does what else the mover is woken for."""
        limit = time.monotonic() + _LOOK_S
        while not message.transfer.done() and time.monotonic() < limit:
            self.step()

    def _wait_for_room(self, message: _Message, deadline: Deadline) -> None:
        while True:
            if self._lifecycle.ended or self._ended:
                raise self._lifecycle.error()
            if not self._in_flight or self._in_flight + message.cost <= self._limit:
                return
            if not self._room.wait(deadline.remaining()) and deadline.expired:
                raise TimeoutError(
                    f"{self._peer} has not taken the {self._in_flight} bytes that are queued for it;"
                    f" there was no room for {message.transfer.nbytes} more (max_in_flight_bytes is"
                    f" {self._limit}), and nothing was queued"
                )

    def _begin(self) -> None:
        """Enqueue what there is room for. Under the lock."""
        while self._queue and len(self._copying) + len(self._told) < WINDOW:
            message = self._queue[0]
            content = message.content
            nbytes = min(self._piece_bytes, content.nbytes - message.begun)
            offset = self._ring.reserve(nbytes) if nbytes else 0
            if offset is None:
                return
            prefix = b"" if message.begun else content.prefix
            event = self._enqueue(message, offset, nbytes) if nbytes else None
            message.begun += nbytes
            self._copying.append(_Flight(message, Piece(prefix, offset, nbytes), event))
            if message.whole:
                self._queue.popleft()

    def _enqueue(self, message: _Message, offset: int, nbytes: int) -> Event:
        runtime, stream, content = self._device.runtime, self._stream.handle, message.content
        assert content.runs is not None
        if not message.begun and content.ready is not None:
            runtime.stream_wait_event(stream, content.ready)
        to = self._staging.address + offset
        for address, length in content.runs.parts(message.begun, nbytes):
            runtime.memcpy_async(to, address, length, stream)
            to += length
        return runtime.event(stream)

    # -- the mover, and senders of what is small -----------------------------------------------------------

    def wait_for_work(self) -> bool:
        """Until something is being copied, or could be. False: it has ended."""
        with self._lock:
            while not (self._ended or self._copying):
                self._work.wait()
            return not self._ended

    def step(self) -> bool:
        """Do what can be done now, without waiting. Whether a copy has come to its end.

        Raises:
            CudaError: the device failed.
        """
        done: list[_Message] = []
        stirred = False
        with self._lock:
            while self._copying and not self._ended:
                flight = self._copying[0]
                if flight.event is not None and not flight.event.is_done():
                    break
                stirred = True
                self._copying.popleft()
                self._told.append(flight)
                self._say(flight.piece.pack())
                if flight.last:
                    done.append(flight.message)
                    flight.message.content = Content(b"", flight.message.content.nbytes)  # lets the tensor go
            if stirred and not self._ended:
                self._begin()
        for message in done:
            message.transfer.finish()
            self._held.pop(id(message), None)  # not before: a forked child ends what is held
        return stirred

    def settled(self) -> bool:
        """Once it has ended: whether the device is done with what it was given.

        Raises:
            CudaError: the device failed, and does nothing more.
        """
        with self._lock:
            return all(flight.event is None or flight.event.is_done() for flight in self._copying)

    # -- the reader ------------------------------------------------------------------------------------

    def taken(self, count: int) -> None:
        """The peer has copied so many pieces.

        Raises:
            WireError: it cannot have.
            CudaError: what has room now could not be begun.
        """
        with self._lock:
            if count > len(self._told):
                raise WireError(f"it has taken {count} pieces, and was told of {len(self._told)}")
            for _ in range(count):
                flight = self._told.popleft()
                if flight.piece.nbytes:
                    self._ring.release()
                if flight.last:
                    self._in_flight -= flight.message.cost
            if not self._ended:
                self._room.notify_all()
                self._begin()
                self._work.notify()
