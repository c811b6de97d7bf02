"""The receiving half of a pipe: the pieces that lie in the peer's memory, and the message they are of.

The caller's own thread enqueues the copies, and returns when the host has seen that they are done. No copy is
enqueued that could wait: memory of the caller's is written when its stream is done with it, so whatever ends
a call, the memory is soon the caller's again. A message that is interrupted by a deadline keeps its place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvplug import PeerGoneError, TimeoutError, TransportError
from kvplug.net.wire import TensorMeta
from kvplug.transport import Deadline, Lifecycle, WireError
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.cudart.library import Event
from kvplug_cuda_ipc.device import Device, Stream
from kvplug_cuda_ipc.memory import Mapping
from kvplug_cuda_ipc.pace import Pace
from kvplug_cuda_ipc.pipe.content import Runs, Target
from kvplug_cuda_ipc.pipe.words import WINDOW, Kind, Piece, meta_of_prefix

if TYPE_CHECKING:
    from torch import Tensor

_PATIENCE_S: Final = 5.0
"""How long a call waits at its end for copies under way. They wait for nothing, and take no longer unless the
device hangs."""


class _Message:
    """What is being received. ``own`` is memory of ours; ``None``: it goes into the caller's."""

    __slots__ = ("got", "meta", "nbytes", "own")

    def __init__(self, meta: TensorMeta | None) -> None:
        self.meta = meta
        self.nbytes = 0 if meta is None else meta.nbytes
        self.got = 0
        self.own: Tensor | None = None

    @property
    def whole(self) -> bool:
        """All of it lies in memory of ours."""
        return self.own is not None and self.got == self.nbytes


class Inbox:
    """``say`` tells the peer something, ``break_down`` ends the pipe and is called without locks."""

    def __init__(
        self,
        mapping: Mapping,
        device: Device,
        stream: Stream,
        *,
        peer: str,
        lifecycle: Lifecycle,
        say: Callable[[Any], None],
        break_down: Callable[[str], None],
    ) -> None:
        self._mapping = mapping
        self._device = device
        self._stream = stream
        self._peer = peer
        self._lifecycle = lifecycle
        self._say = say
        self._break_down = break_down
        self._lock = (
            threading.RLock()
        )  # a signal's handler may abort the pipe while its own thread is in here
        self._changed = threading.Condition(self._lock)
        self._pieces: deque[Piece] = deque()
        """Told, and not taken."""
        self._expected = 0
        """Bytes of the message whose pieces are coming that have not been told of."""
        self._parts = 0
        """How many of the pieces are of a message that is not wholly told of."""
        self._message: _Message | None = None
        self._no_more = False
        self._ended = False
        self._hung: list[object] = []
        """Memory that the device may be writing to for ever."""
        self._inside = threading.Lock()
        """Held while the peer's memory is in use."""

    # -- callers ---------------------------------------------------------------------------------------

    def receive(self, target: Target, deadline: Deadline) -> Tensor | None:
        """Only one thread at a time, whose current device is ours. Raises as ``Pipe.recv_tensor``."""
        message = self._message or self._first(deadline)
        target.check(message.meta)
        with self._inside:
            if not message.whole:
                self._check()
            self._message = message
            if message.nbytes:
                direct = self._fill(message, target, deadline)
                value = target.value(None if direct else message.own)
            else:
                value = target.value(None if message.meta is None else self._empty(message))
                self._take_empty()
            self._message = None
            return value

    def wake(self) -> None:
        """It has ended: whoever waits looks at it. Blocks nowhere."""
        with self._lock:
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more is received."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()

    def expect_no_more(self) -> None:
        """The peer tells of nothing more. Messages that it has wholly told of can still be received."""
        with self._lock:
            self._no_more = True
            for _ in range(self._parts):
                self._pieces.pop()
            self._parts = 0
            self._changed.notify_all()

    def leave(self, deadline: Deadline) -> None:
        """Give up the peer's memory, once nobody uses it and nothing is left there. For the mover."""
        with self._lock:
            while self._no_more and self._pieces and not self._ended and not deadline.expired:
                self._changed.wait(deadline.remaining())
            self._ended = True
            self._changed.notify_all()
        with self._inside:
            if self._message is not None and not self._message.whole:
                self._message = None
            self._mapping.close()

    def _first(self, deadline: Deadline) -> _Message:
        with self._lock:
            while not self._pieces:
                self._check(waits=True)
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    raise TimeoutError(
                        f"no message has arrived from {self._peer}; it is alive as far as can be seen"
                    )
            self._check()
            return _Message(meta_of_prefix(self._pieces[0].prefix))

    def _check(self, *, waits: bool = False) -> None:
        if self._ended or self._lifecycle.closed or self._lifecycle.broken or (waits and self._no_more):
            raise self._lifecycle.error()

    def _empty(self, message: _Message) -> Tensor:
        assert message.meta is not None
        return self._device.empty(message.meta, self._stream)

    def _fill(self, message: _Message, target: Target, deadline: Deadline) -> bool:
        """Have all of it copied. Whether into the caller's memory."""
        runs = target.runs() if message.own is None else None
        if runs is None and message.own is None:
            message.own = self._empty(message)
        own = message.own
        filling = _Filling(self, message, runs or Runs([own]), target.ready() if runs else None)
        try:
            filling.run(deadline)
        except TimeoutError:
            if runs is not None and message.got:
                self._keep(message, runs)
            raise
        except PeerGoneError:
            self._message = None  # copies that came to their end since then make it no message after the end
            raise
        except BaseException as e:
            if not self._lifecycle.ended:
                self._break_down(f"it was interrupted in the middle of a message: {e!r}")
            raise
        return runs is not None

    def _keep(self, message: _Message, runs: Runs) -> None:
        """Take what has arrived out of the caller's memory, which is the caller's again now."""
        try:
            own = self._empty(message)
            to = own.data_ptr()
            for address, length in runs.parts(0, message.got):
                self._device.runtime.memcpy_async(to, address, length, self._stream.handle)
                to += length
            if not _wait(self._device.runtime.event(self._stream.handle)):
                raise TransportError("a copy on the device does not end")
        except BaseException as e:
            self._break_down(f"the part of a message that had arrived could not be kept: {e!r}")
            raise
        message.own = own

    def _take_empty(self) -> None:
        try:
            self._take(1)
        except BaseException as e:  # Ctrl-C: nobody knows how far it got
            self._break_down(f"it was interrupted in the middle of a message: {e!r}")
            raise

    def _take(self, count: int) -> None:
        """So many pieces were copied."""
        with self._lock:
            for _ in range(min(count, len(self._pieces))):
                self._pieces.popleft()
            self._parts = min(self._parts, len(self._pieces))
            self._changed.notify_all()
        self._say([Kind.TAKEN.value, count])

    # -- the reader ------------------------------------------------------------------------------------

    def told(self, piece: Piece) -> None:
        """The peer has bytes for us.

        Raises:
            WireError: it contradicts itself, or has told more than it may.
        """
        with self._lock:
            if bool(piece.prefix) is bool(self._expected):
                raise WireError("it tells of a message within another, or of bytes of none")
            if piece.prefix:
                meta = meta_of_prefix(piece.prefix)
                self._expected = 0 if meta is None else meta.nbytes
            if piece.nbytes > self._expected or (self._expected and not piece.nbytes):
                raise WireError(f"it tells of {piece.nbytes} bytes of {self._expected} that are left")
            if piece.offset + piece.nbytes > self._mapping.nbytes:
                raise WireError("it tells of bytes that lie outside of its memory")
            if len(self._pieces) >= WINDOW:
                raise WireError(f"it tells of more than {WINDOW} pieces that were not taken")
            self._expected -= piece.nbytes
            self._pieces.append(piece)
            self._parts = self._parts + 1 if self._expected else 0
            self._changed.notify_all()


class _Filling:
    """The pieces of a message on their way into memory, several at a time."""

    def __init__(self, inbox: Inbox, message: _Message, runs: Runs, ready: Event | None) -> None:
        self._inbox = inbox
        self._message = message
        self._runs = runs
        self._ready = ready
        self._begun = message.got
        self._flying: deque[tuple[int, Event]] = deque()

    def run(self, deadline: Deadline) -> None:
        """Raises TimeoutError: not all of it has come; ``got`` says how much has."""
        inbox, message, pace = self._inbox, self._message, Pace()
        try:
            while message.got < message.nbytes:
                inbox._check()
                if self._land() or self._begin():
                    pace.stir()
                elif deadline.expired:
                    self._land_all()  # which is not waiting: it is on its way
                    if message.got < message.nbytes:
                        raise self._late()
                elif self._flying or not self._may_begin():
                    pace.rest()
                else:
                    self._wait_for_more(deadline)
        finally:
            self._land_all()

    def _may_begin(self) -> bool:
        if self._ready is not None and self._ready.is_done():
            self._ready = None
        return self._ready is None

    def _begin(self) -> bool:
        """Enqueue the copies of what has come. Whether anything had."""
        if not self._may_begin():
            return False
        inbox = self._inbox
        with inbox._lock:
            new = list(inbox._pieces)[len(self._flying) :]
        runtime, stream = inbox._device.runtime, inbox._stream.handle
        for number, piece in enumerate(new):
            if self._begun == self._message.nbytes:
                return number > 0
            source = inbox._mapping.address + piece.offset
            for address, length in self._runs.parts(self._begun, piece.nbytes):
                runtime.memcpy_async(address, source, length, stream)
                source += length
            self._begun += piece.nbytes
            self._flying.append((piece.nbytes, runtime.event(stream)))
        return bool(new)

    def _land(self) -> bool:
        """Whether a copy has come to its end."""
        count = 0
        while self._flying and self._flying[0][1].is_done():
            nbytes, _ = self._flying.popleft()
            self._message.got += nbytes
            count += 1
        if count:
            self._inbox._take(count)
        return count > 0

    def _land_all(self) -> None:
        """At the end, whatever it is: nothing is written to the memory after this."""
        if self._flying:
            if not _wait(self._flying[-1][1]):
                self._inbox._hung.append((self._runs, self._flying))
                raise TransportError(
                    "a copy on the device does not end: the memory that was given may still be written to"
                )
            self._land()

    def _wait_for_more(self, deadline: Deadline) -> None:
        inbox = self._inbox
        with inbox._lock:
            while len(inbox._pieces) <= len(self._flying):
                inbox._check(waits=True)
                if not inbox._changed.wait(deadline.remaining()) and deadline.expired:
                    return

    def _late(self) -> TimeoutError:
        message = self._message
        return TimeoutError(
            f"{message.got} of {message.nbytes} bytes of a tensor have arrived from {self._inbox._peer};"
            " the next call goes on with it"
        )


def _wait(event: Event) -> bool:
    """Whether it is done, soon."""
    deadline, pace = Deadline.after(_PATIENCE_S), Pace()
    try:
        while not event.is_done():
            if deadline.expired:
                return False
            pace.rest()
    except CudaError:
        return True  # the device has failed, and writes nothing more
    return True
