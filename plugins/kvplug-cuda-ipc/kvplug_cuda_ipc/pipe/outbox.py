"""The sending half of a pipe: what is queued, what is being copied, what the peer was told of.

    queued -> being copied to staging memory -> copied and announced -> taken by the peer

The tensor is the caller's again when all of it was copied. A piece is announced when this end's host has seen
that its copy is done, so that no GPU waits for another process. A caller queues its message and enqueues the
first copies if there is room; the pipe's worker does everything else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvplug.transport import Deadline, Lifecycle, SendWindow, Transfer, WireError
from kvplug_cuda_ipc.cudart.library import Event
from kvplug_cuda_ipc.device import Device, Stream
from kvplug_cuda_ipc.memory import Ring, Staging
from kvplug_cuda_ipc.pipe.content import Content
from kvplug_cuda_ipc.pipe.frames import MAX_PIECES, Piece

_SPIN_S: Final = 50e-6
_SPIN_BYTES: Final = 256 * 1024
"""After sending a message of up to this size, the caller does the worker's part for up to ``_SPIN_S``."""


class _Message:
    __slots__ = ("content", "cost", "enqueued", "transfer")

    def __init__(self, content: Content, cost: int) -> None:
        self.content = content
        self.cost = cost
        self.transfer = Transfer(content.nbytes)
        self.enqueued = 0
        """Bytes whose copies were enqueued."""

    @property
    def whole(self) -> bool:
        """All its copies were enqueued."""
        return self.enqueued == self.content.nbytes


class _Copy:
    """A piece on its way to staging memory, and then in it."""

    __slots__ = ("event", "last", "message", "piece")

    def __init__(self, message: _Message, piece: Piece, event: Event | None) -> None:
        self.message = message
        self.piece = piece
        self.event = event
        self.last = message.whole

    def is_done(self) -> bool:
        return self.event is None or self.event.is_done()


class Outbox:
    """``announce(piece)`` tells the peer; ``fail_pipe(reason)``, called without locks, ends the pipe."""

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
        announce: Callable[[Piece], None],
        fail_pipe: Callable[[str], None],
    ) -> None:
        self._staging = staging
        self._device = device
        self._stream = stream
        self._piece_bytes = min(piece_bytes, staging.nbytes // 2)
        self._lifecycle = lifecycle
        self._announce = announce
        self._fail_pipe = fail_pipe
        self._ring = Ring(staging.nbytes)
        self._window = SendWindow(limit=limit, peer=peer, lifecycle=lifecycle)
        self._lock = self._window.lock
        self._work = threading.Condition(self._lock)
        self._queue: deque[_Message] = deque()
        """Messages with copies that were not enqueued."""
        self._copying: deque[_Copy] = deque()
        self._announced: deque[_Copy] = deque()
        self._unresolved: dict[int, _Message] = {}
        """Messages whose transfers have not ended, by identity."""

    # -- callers ---------------------------------------------------------------------------------------

    def send(self, content: Content, deadline: Deadline) -> Transfer:
        """Only one thread at a time, whose current device is the pipe's. Raises as ``Pipe.send_tensor``."""
        queued = False
        try:
            with self._lock:
                message = _Message(content, self._window.cost(content.nbytes))
                self._window.wait_for_room(content.nbytes, deadline)
                queued = True
                self._window.add(message.cost)
                self._queue.append(message)
                self._unresolved[id(message)] = message
                self._enqueue()
            if content.nbytes <= _SPIN_BYTES:
                self._spin(message)
            with self._lock:
                self._work.notify()
        except BaseException as e:
            if queued:  # Ctrl-C, or the device failed: how far the message got is not known
                self._fail_pipe(f"a message was not begun: {e!r}")
            raise
        return message.transfer

    def drain(self, deadline: Deadline) -> bool:
        """As :meth:`SendWindow.drain`."""
        return self._window.drain(deadline)

    def _spin(self, message: _Message) -> None:
        """A small message is soon copied: waking the worker for it would take longer."""
        limit = time.monotonic() + _SPIN_S
        while not message.transfer.done() and time.monotonic() < limit:
            self.step()

    def _enqueue(self) -> None:
        """Enqueue the copies that there is room for. With the lock."""
        while self._queue and len(self._copying) + len(self._announced) < MAX_PIECES:
            message = self._queue[0]
            content = message.content
            nbytes = min(self._piece_bytes, content.nbytes - message.enqueued)
            offset = self._ring.reserve(nbytes) if nbytes else 0
            if offset is None:
                return
            prefix = b"" if message.enqueued else content.prefix
            event = self._copy(message, offset, nbytes) if nbytes else None
            message.enqueued += nbytes
            self._copying.append(_Copy(message, Piece(prefix, offset, nbytes), event))
            if message.whole:
                self._queue.popleft()

    def _copy(self, message: _Message, offset: int, nbytes: int) -> Event:
        runtime, stream, content = self._device.runtime, self._stream.handle, message.content
        assert content.runs is not None
        if not message.enqueued and content.ready is not None:
            runtime.stream_wait_event(stream, content.ready)
        to = self._staging.address + offset
        for address, length in content.runs.parts(message.enqueued, nbytes):
            runtime.memcpy_async(to, address, length, stream)
            to += length
        return runtime.event(stream)

    # -- the worker, and senders of small messages -------------------------------------------------------

    def wait_for_work(self) -> bool:
        """Wait until copies are under way. False: the pipe has ended."""
        with self._lock:
            while not (self._window.ended or self._copying):
                self._work.wait()
            return not self._window.ended

    def step(self) -> bool:
        """Announce the pieces that were copied, and enqueue the next ones; waits for nothing.

        Returns whether a piece was announced.

        Raises:
            CudaError: the device failed.
        """
        sent: list[_Message] = []
        progress = False
        with self._lock:
            while self._copying and not self._window.ended and self._copying[0].is_done():
                progress = True
                copy = self._copying.popleft()
                self._announced.append(copy)
                self._announce(copy.piece)
                if copy.last:
                    sent.append(copy.message)
                    copy.message.content = Content(b"", copy.message.content.nbytes)  # drops the tensor
            if progress and not self._window.ended:
                self._enqueue()
        for message in sent:
            message.transfer.finish()
            self._unresolved.pop(id(message), None)  # only now: a forked child ends what is in there
        return progress

    # -- the reader ------------------------------------------------------------------------------------

    def taken(self, count: int) -> None:
        """The peer has copied ``count`` pieces.

        Raises:
            WireError: so many were not announced.
            CudaError: a copy that now has room could not be enqueued.
        """
        with self._lock:
            if count > len(self._announced):
                raise WireError(f"it has taken {count} pieces where {len(self._announced)} were announced")
            for _ in range(count):
                copy = self._announced.popleft()
                if copy.piece.nbytes:
                    self._ring.release()
                if copy.last:
                    self._window.settle(copy.message.cost)
            if not self._window.ended:
                self._enqueue()
                self._work.notify()

    # -- how it ends -----------------------------------------------------------------------------------

    def fail(self) -> None:
        """Nothing more is announced; every unresolved transfer fails with how the pipe ended. Idempotent."""
        with self._lock:
            self._queue.clear()
            self._window.end()
            self._work.notify_all()
            lost = dict(self._unresolved)
        interrupted: BaseException | None = None
        for key, message in lost.items():
            try:
                message.transfer.fail(self._lifecycle.error())
            except BaseException as e:  # Ctrl-C, or of a callback; the other transfers must fail, too
                interrupted = e
            self._unresolved.pop(key, None)  # only now: a forked child ends what is in there
        if interrupted is not None:
            raise interrupted

    def is_idle(self) -> bool:
        """After :meth:`fail`: whether the device has finished every copy.

        Raises:
            CudaError: the device failed, and does nothing more.
        """
        with self._lock:
            return all(copy.is_done() for copy in self._copying)
