"""The base of pipes whose sender offers its messages, and whose receiver moves them from there.

    queued -> offered, once the device has written it -> moved by the receiver -> taken

A message consists of one or more *offers*. Each says where bytes of the message lie, in the transport's own
words, its *place*; the first one also announces the message. The ends send each other these values over a
channel:

    offer      prefix, number of bytes, place: these bytes can be moved
    taken      how many offers were moved: their memory belongs to the sender again
    heartbeat  this end is alive
    goodbye    this end sends nothing more. True: it was closed, and everything that it sent was taken

A transport may add values of its own. One thread per pipe, the worker, receives them, announces offers that
become ready, and notices the peer's end. Callers queue messages, and move what they receive, in their own
threads.
"""

from __future__ import annotations

import abc
import contextlib
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import attrs

from kvplug.errors import (
    BusyError,
    ClosedError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
    TransportError,
    UnsupportedError,
    WireError,
)
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import no_fork
from kvplug.net.liveness import Watch
from kvplug.net.threads import BackgroundThread
from kvplug.net.wire.messages import read_prefix
from kvplug.net.wire.tensors import TensorMeta
from kvplug.transport.pipe.blocks import Blocks
from kvplug.transport.pipe.content import Content, Target, bytes_of, cut, spans_of
from kvplug.transport.pipe.device import Mark, TensorDevice
from kvplug.transport.pipe.join import PipeJoin
from kvplug.transport.pipe.partial import PartialMessage
from kvplug.transport.pipe.pipe import DuplexPipe
from kvplug.transport.pipe.transfer import SendWindow, Transfer

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S: Final = 1.0
"""Seconds between two looks of an idle worker at the pipe's state."""
_SEND_S: Final = 5.0
"""Seconds that the peer may take to read a value. The connection holds all values that may be unread."""
_JOIN_S: Final = 1.0
"""Seconds that ``close`` waits for the worker to give everything back."""
_COPY_S: Final = 5.0
"""Seconds that a call waits at its end for a copy on the device. Only a device that hangs takes longer."""
_SPIN_S: Final = 50e-6
_SPIN_BYTES: Final = 256 * 1024
"""The sender of a message of up to this size waits up to ``_SPIN_S`` for the device: waking the worker would
take longer."""


class Backoff:
    """The pauses of one wait that polls: none for 100 µs, then longer and longer ones, up to 1 ms."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Poll without pauses again, since there was progress."""
        self._spin_until = time.monotonic() + 100e-6
        self._pause_s = 20e-6

    def pause(self) -> None:
        """Sleep until the next poll is due."""
        if time.monotonic() < self._spin_until:
            time.sleep(0)  # lets other threads have the interpreter
            return
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, 1e-3)


class SentMessage:
    """A message that this end sends."""

    __slots__ = ("content", "cost", "is_copied", "num_offered", "place", "transfer")

    def __init__(self, content: Content, cost: int) -> None:
        self.content = content
        self.cost = cost
        self.transfer = Transfer(content.nbytes)
        self.num_offered = 0
        """Bytes for which offers were made."""
        self.is_copied = content.is_copy or not content.nbytes
        """Whether the caller may overwrite the tensor once the whole message is announced, and not only when
        it is taken."""
        self.place: Any = None
        """The transport's own."""


@attrs.define(eq=False)
class Offer:
    """Bytes of a message that this end sends, and that the peer may move once they are ready."""

    message: SentMessage
    nbytes: int
    ready: Mark | None
    """Passed when the device has written the bytes; ``None``: it has."""
    place: Any = None
    """Where they lie, for the peer."""
    is_first: bool = True
    is_last: bool = True
    work: Any = None
    """What moves them, if that is this end."""


@attrs.frozen(eq=False)
class ComingOffer:
    """Bytes of a message that the peer offers."""

    meta: TensorMeta | None
    """Of the whole message, in its first offer."""
    nbytes: int
    place: Any


class ComingMessage(PartialMessage):
    """The message that is being received."""

    __slots__ = ("state",)

    def __init__(self, meta: TensorMeta | None) -> None:
        super().__init__(meta)
        self.state: Any = None
        """The transport's own, for a call that resumes the message."""

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are in memory of this end, so that the peer is not needed."""
        return self.own is not None and self.got == self.nbytes


class _ComingOffers:
    """The offers that this end has not taken, in order. The worker adds them, receivers take them."""

    def __init__(self, lock: threading.RLock, lifecycle: DuplexPipe.Lifecycle, most: int) -> None:
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._lifecycle = lifecycle
        self._most = most
        self._offers: deque[ComingOffer] = deque()
        self._missing = 0
        """Bytes of the last message that are still to be offered."""
        self._incomplete = 0
        """How many of the last offers belong to a message that is not wholly offered."""
        self._no_more = False
        self._stopped = False

    def add(self, prefix: bytes, nbytes: int, read_place: Callable[[TensorMeta | None], Any]) -> None:
        """
        Raises:
            WireError: the offer contradicts earlier ones, or is one too many.
        """
        with self._lock:
            if bool(prefix) is bool(self._missing):
                raise WireError("it offers a message within another, or bytes of no message")
            meta = _meta_of(prefix) if prefix else None
            missing = self._missing or (meta.nbytes if meta is not None else 0)
            if not 0 <= nbytes <= missing or (missing and not nbytes):
                raise WireError(f"it offers {nbytes} bytes where {missing} are left")
            if len(self._offers) >= self._most:
                raise WireError(f"it offers more than {self._most} times before anything is taken")
            self._offers.append(ComingOffer(meta, nbytes, read_place(meta)))
            self._missing = missing - nbytes
            self._incomplete = self._incomplete + 1 if self._missing else 0
            self._changed.notify_all()

    def end(self, survives: Callable[[ComingOffer], bool]) -> bool:
        """Expect no more. Keep whole messages whose offers all survive, up to the first that does not; return
        whether any were dropped."""
        with self._lock:
            self._no_more = True
            whole = list(self._offers)[: len(self._offers) - self._incomplete]
            kept = next((at for at, each in enumerate(whole) if not survives(each)), len(whole))
            dropped = len(self._offers) - kept
            self._offers = deque(whole[:kept])
            self._incomplete = 0
            self._changed.notify_all()
            return dropped > 0

    def stop(self) -> None:
        """Let nothing more be taken, and wake the threads that wait."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """
        Raises:
            KvplugError: nothing more can be taken; the error says why.
        """
        if self._stopped or self._lifecycle.broken or (self._no_more and not self._offers):
            raise self._lifecycle.error()

    def oldest(self, deadline: Deadline) -> ComingOffer | None:
        """Wait for an offer and return it; it stays. ``None``: none came in time. Raises as :meth:`check`."""
        with self._lock:
            self.check()
            while not self._offers:
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    return None
                self.check()
            return self._offers[0]

    def after(self, count: int) -> list[ComingOffer]:
        """Return all but the oldest ``count``."""
        with self._lock:
            return list(self._offers)[count:]

    def take(self, count: int) -> None:
        """Remove the oldest ``count``. After the end there may be fewer."""
        with self._lock:
            for _ in range(min(count, len(self._offers))):
                self._offers.popleft()
            self._incomplete = min(self._incomplete, len(self._offers))
            self._changed.notify_all()

    def wait(self, deadline: Deadline) -> None:
        """Wait for a change: an offer came or was taken, or the pipe ends."""
        with self._lock:
            self._changed.wait(deadline.remaining())

    def wait_until_taken(self, deadline: Deadline) -> None:
        """Wait until nothing is left to take, or :meth:`stop`."""
        with self._lock:
            while self._offers and not self._stopped and not deadline.expired:
                self._changed.wait(deadline.remaining())


class OfferPipe(DuplexPipe):
    """The base of pipes that move messages out of the sender's memory; see this module's docstring.

    Law of order on a device. A message that was sent behind late kernels carries their result: it is offered
    when the device has passed the mark that the call set on the caller's current stream, and the caller does
    not wait for that. Memory of the caller is written only after its current stream has done what it was
    given before the call. A message in new memory, or copied to where it belongs, is there for what the
    caller queues next. No work on a device waits for the peer.

    A subclass sets :attr:`NAME`, calls :meth:`_start` when it is complete, and implements :meth:`_move`. It
    overrides what else it needs of the methods below "what a transport writes".
    """

    Backoff: TypeAlias = Backoff
    """The pauses of a wait that polls."""
    ComingMessage: TypeAlias = ComingMessage
    """The message that is being received."""
    ComingOffer: TypeAlias = ComingOffer
    """Bytes of a message that the peer offers."""
    Device: TypeAlias = TensorDevice
    """The device of the tensors. Plugins subclass it."""
    Join: TypeAlias = PipeJoin
    """A pipe in the making."""
    Offer: TypeAlias = Offer
    """Bytes of a message that this end offers."""
    SentMessage: TypeAlias = SentMessage
    """A message that this end sends."""
    bytes_of = staticmethod(bytes_of)
    spans_of = staticmethod(spans_of)
    cut = staticmethod(cut)

    NAME: ClassVar[str]
    """The transport's name, for messages and the worker's thread."""
    MAX_OFFERS: ClassVar[int] = 64
    """The most offers that are not taken. It bounds what a receiver that stops has to store."""
    MAX_RUNS: ClassVar[int] = 1024
    """Blocks of more layers than this are gathered and scattered, instead of moved where they lie."""

    AWAITS_DEVICE: ClassVar[bool] = False
    """Whether a message is moved into new memory, too, only when the caller's stream is done: for a transport
    that has no streams of its own, and waits for copies that a busy device would hold up."""

    @attrs.frozen(kw_only=True)
    class Settings(DuplexPipe.Settings):
        """What a pipe takes from its endpoint's context and options. A transport adds its own."""

        device: TensorDevice
        """The device of the tensors."""
        max_in_flight_bytes: int
        """The most bytes that may be sent and not taken."""
        copy_bytes: int = 0
        """Messages of up to this size are copied when they are sent."""

    def __init__(self, join: PipeJoin, settings: Settings) -> None:
        """Take over the channel and the pidfd of ``join`` when :meth:`_start` returns.

        Raises:
            TransportError, ResourceExhaustedError: there are no more streams or descriptors.
        """
        super().__init__(join.peer, settings, device=settings.device.name)
        self._join = join
        self._device = settings.device
        self._copy_bytes = settings.copy_bytes
        self.channel = join.channel
        """Carries the values."""
        self._pidfd = join.pidfd
        self._silence_s = join.silence_s
        self._window = SendWindow(
            limit=settings.max_in_flight_bytes, peer=join.peer, lifecycle=self._lifecycle
        )
        self._lock = self._window.lock
        """Guards the messages both ways. Re-entrant: a signal handler may abort the pipe while its thread
        holds the lock."""
        self._queue: deque[SentMessage] = deque()
        """Messages for which offers have still to be made."""
        self._pending: deque[Offer] = deque()
        """Offers that are not announced."""
        self._announced: deque[Offer] = deque()
        """Offers that are announced and still in use."""
        self._num_taken = 0
        """How many of those the peer has taken."""
        self._unresolved: dict[int, SentMessage] = {}
        """Messages whose transfers have not ended, by identity."""
        self._coming = _ComingOffers(self._lock, self._lifecycle, self.MAX_OFFERS)
        self._incoming: ComingMessage | None = None
        self._moving = threading.Lock()
        """Held while memory of the peer's is in use."""
        self._hung: list[object] = []
        """Memory that a device which hangs may still write to."""
        self._wake_fd: int | None = None
        with contextlib.ExitStack() as undo:
            self._stream = settings.device.new_stream()
            """For what is received: only this pipe uses it."""
            undo.callback(self._stream.close)
            with no_fork:
                self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poller = select.poll()
            for fd in (self.channel.fileno(), self._wake_fd, self._pidfd):
                if fd is not None:
                    self._poller.register(fd, select.POLLIN)
            undo.pop_all()
        self._runs = queue.SimpleQueue[bool]()
        self._worker = BackgroundThread(self._work, name=f"kvplug-{self.NAME}", stop=self.abort)

    def _start(self) -> None:
        """Start the worker. If it cannot be started, the channel and the pidfd stay the join's.

        Raises:
            ResourceExhaustedError: there are no more threads.
        """
        try:
            with NamedExhaustion("a pipe needs a thread"):
                self._worker.start()
        except BaseException:
            self._pidfd = None
            self._close_descriptors()
            self._stream.close()
            self._runs.put(False)
            raise
        self._join.pidfd = None
        self._runs.put(True)

    # -- what a transport writes -------------------------------------------------------------------------

    def _prepare(self, message: SentMessage) -> None:
        """Prepare the memory of a message that is about to be queued. In the caller, without locks."""

    def _next_offer(self, message: SentMessage) -> Offer | None:
        """Return the next offer of a message, or ``None`` if there is no room for one now. With the lock.

        By default the message is offered as a whole, when its content is ready.
        """
        return Offer(message, message.content.nbytes, message.content.ready, message.place)

    def _place_of(self, offer: Offer) -> Any:
        """Return the place of an offer that is ready and announced now. With the lock."""
        return offer.place

    def _is_unused(self, offer: Offer) -> bool:
        """Whether this end's device does not use the memory of an offer that the peer has taken. With the
        lock.

        Raises:
            WireError: the peer cannot have taken it.
        """
        return True

    def _taken_back(self, offer: Offer) -> None:
        """The memory of an offer belongs to this end again. With the lock."""

    def _forget(self, message: SentMessage) -> None:
        """The message was taken, or will not be queued. Maybe with the lock."""

    def _read_place(self, meta: TensorMeta | None, nbytes: int, place: Any) -> Any:
        """Return the place in an offer of the peer as this end's receivers need it. ``meta`` is ``None``
        except in the first offer of a tensor.

        Raises:
            WireError: there cannot be such a place.
        """
        if place is not None:
            raise WireError("it says where bytes lie that this transport does not move")

    def _survives(self, offer: ComingOffer) -> bool:
        """Whether an offer can be moved even though the peer has ended."""
        return not offer.nbytes

    def _moves_in_place(self, deadline: Deadline) -> bool:
        """Whether a call with this deadline may move a message into the caller's memory."""
        return True

    @abc.abstractmethod
    def _move(
        self, message: ComingMessage, memory: list[Tensor], deadline: Deadline, *, in_place: bool
    ) -> bool:
        """Move the rest of a message into ``memory``, contiguous tensors that may be written now, and count
        the bytes in ``message.got``. Call :meth:`_take` for each offer. In the caller's thread.

        Returns False at the deadline. Nothing is written any more when it returns or raises, unless
        ``in_place`` is False, and it returns: then the next call goes on.

        Raises:
            KvplugError: the pipe has ended or fails, or its memory cannot be used.
        """

    def _on_value(self, kind: str, content: list[Any]) -> None:
        """Handle a value of the transport's own. In the worker.

        Raises:
            WireError: there is no such value.
        """
        raise WireError(f"it sent a value that the pipe {self.NAME!r} does not know")

    def _step(self) -> bool:
        """Do in the worker what can be done now. Return whether to look again soon."""
        self._announce()
        if self._num_taken:
            self._settle()
        return bool(self._pending or self._num_taken)

    def _look(self) -> None:
        """Check now and then, in the worker, that the transport still works."""

    def _revoke(self) -> bool:
        """Make sure that the peer does not take memory for a message which this end takes back now. Any
        thread, without waiting. Idempotent.

        False: that takes time, and the transport calls :meth:`_fail_transfers` when it is done.
        """
        return True

    def _free(self) -> None:
        """Give back what the pipe has of the transport. In the worker, at the end, when no call uses it."""

    # -- sending -----------------------------------------------------------------------------------------

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        with self._on_device():
            content = Content.of_tensor(tensor, self._device, self._copy_bytes)
            return self._send(content, self._deadline(timeout))

    def _send_blocks(self, blocks: Blocks, timeout: Timeout) -> Transfer:
        with self._on_device():
            content = Content.of_blocks(blocks, self._device, self.MAX_RUNS, self._copy_bytes)
            return self._send(content, self._deadline(timeout))

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._device.is_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured on this stream, and messages of a pipe cannot be part of one"
            )
        with self._device.current():
            yield

    def _send(self, content: Content, deadline: Deadline) -> Transfer:
        with self._lock:
            self._window.wait_for_room(content.nbytes, deadline)
        message = SentMessage(content, self._window.cost(content.nbytes))
        is_queued = False
        try:
            self._prepare(message)
            with self._lock:
                self._check_sending()
                is_queued = True
                self._window.add(message.cost)
                self._unresolved[id(message)] = message
                self._queue.append(message)
                self._make_offers()
            self._announce()
            if self._pending and content.nbytes <= _SPIN_BYTES:
                spin_until = time.monotonic() + _SPIN_S
                while self._pending and time.monotonic() < spin_until:
                    self._announce()
        except BaseException as e:
            if is_queued:  # Ctrl-C, or the device failed: how far the message came is not known
                self._fail(f"a message was not sent: {e!r}")
            else:
                self._forget(message)
            raise
        if self._pending:
            self._wake()
        return message.transfer

    def _make_offers(self) -> None:
        """Make the offers that there is room for. With the lock."""
        while self._queue and len(self._pending) + len(self._announced) < self.MAX_OFFERS:
            message = self._queue[0]
            offer = self._next_offer(message)
            if offer is None:
                return
            offer.is_first = not message.num_offered
            message.num_offered += offer.nbytes
            offer.is_last = message.num_offered == message.content.nbytes
            self._pending.append(offer)
            if offer.is_last:
                self._queue.popleft()

    def _announce(self) -> bool:
        """Announce the offers that are ready. Return whether there were any."""
        sent, has_announced = [], False
        with self._lock:
            while self._pending and not self._window.ended and _is_done(self._pending[0].ready):
                has_announced = True
                offer = self._pending.popleft()
                self._announced.append(offer)
                prefix = offer.message.content.prefix if offer.is_first else b""
                self._tell("offer", prefix, offer.nbytes, self._place_of(offer))
                if offer.is_last and offer.message.is_copied:
                    sent.append(offer.message)
            if has_announced and not self._window.ended:
                self._make_offers()
        self._finish(sent)
        return has_announced

    def _settle(self) -> None:
        """End the messages that the peer has taken."""
        settled = []
        with self._lock:
            while self._num_taken and self._is_unused(self._announced[0]):
                offer = self._announced.popleft()
                self._num_taken -= 1
                self._taken_back(offer)
                if offer.is_last:
                    self._forget(offer.message)
                    self._window.settle(offer.message.cost)
                    settled.append(offer.message)
            if not self._window.ended:
                self._make_offers()
        self._finish(settled)

    def _finish(self, messages: list[SentMessage]) -> None:
        for message in messages:
            message.transfer.finish()
            self._unresolved.pop(id(message), None)  # only now: a forked child ends what is in there

    def _fail_transfers(self) -> None:
        """Fail every transfer that has not ended. Idempotent."""
        with self._lock:
            self._queue.clear()
            self._window.end()
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

    # -- receiving ---------------------------------------------------------------------------------------

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        with self._on_device():
            return self._receive(Target(self._device, self.MAX_RUNS, out=out), self._deadline(timeout))

    def _receive_blocks(self, blocks: Blocks, timeout: Timeout) -> None:
        with self._on_device():
            self._receive(Target(self._device, self.MAX_RUNS, blocks=blocks), self._deadline(timeout))

    def _receive(self, target: Target, deadline: Deadline) -> Tensor | None:
        message = self._incoming or self._next_message(deadline)
        target.check(message.meta)
        with self._moving:
            is_in_place = False
            if not message.is_complete:
                self._coming.check()
                if not message.nbytes:
                    if message.meta is not None and target.is_new:
                        message.own = self._new_tensor(message.meta)
                    self._take()
                else:
                    self._incoming = message
                    is_in_place = self._fill(message, target, deadline)
            value = target.value(None if is_in_place else message.own)
            self._incoming = None
            return value

    def _next_message(self, deadline: Deadline) -> ComingMessage:
        offer = self._coming.oldest(deadline)
        if offer is None:
            raise TimeoutError(f"no message has arrived from {self._peer}; it is alive as far as can be seen")
        return ComingMessage(offer.meta)

    def _new_tensor(self, meta: TensorMeta) -> Tensor:
        return self._device.empty(meta, self._stream)

    def _fill(self, message: ComingMessage, target: Target, deadline: Deadline) -> bool:
        """Move all that is left of a message. Return whether it went into the caller's memory."""
        memory = None
        if message.own is None and self._moves_in_place(deadline):
            memory = target.memory()
        in_place = memory is not None
        if memory is None:
            if message.own is None:
                self._limit.check(message.nbytes, self._peer)
                assert message.meta is not None
                message.own = self._new_tensor(message.meta)
            memory = [message.own]
        try:
            must_wait = in_place or self.AWAITS_DEVICE
            writable = self._device.now(memory[0].device) if must_wait else None
            is_whole = (
                writable is None or self._poll(writable.is_done, self._coming.check, deadline)
            ) and self._move(message, memory, deadline, in_place=in_place)
            if not is_whole and in_place and message.got:
                self._keep(message, memory)
        except PeerGoneError:
            self._incoming = None
            raise
        except BaseException as e:
            if not self._lifecycle.ended:
                is_ours = isinstance(e, KvplugError)
                self._fail(str(e) if is_ours else f"{PartialMessage.INTERRUPTED}: {e!r}")
            raise
        if not is_whole:
            raise message.late(self._peer)
        return in_place

    def _keep(self, message: ComingMessage, memory: list[Tensor]) -> None:
        """Copy what has arrived out of the caller's memory, which belongs to the caller again after this."""
        own = message.allocate_own(self._new_tensor, self._fail)
        flat, at = bytes_of(own), 0
        with self._copying(own, *memory):
            for each in memory:
                part = bytes_of(each)[: message.got - at]
                flat[at : at + len(part)].copy_(part, non_blocking=True)
                at += len(part)
        message.own = own

    @contextlib.contextmanager
    def _copying(self, *memory: Tensor) -> Iterator[None]:
        """Queue copies on the pipe's own stream while the block runs; at its end they are done."""
        with self._stream.current():
            yield
            copied = self._device.now(memory[0].device)
        if copied is not None and not self._poll(copied.is_done, lambda: None, Deadline.after(_COPY_S)):
            self._hung.append(memory)
            raise TransportError("a copy on the device does not end")

    def _take(self, count: int = 1) -> None:
        """Tell the peer that the oldest ``count`` offers were moved."""
        try:
            self._coming.take(count)
            self._tell("taken", count)
        except BaseException as e:  # Ctrl-C: whether the peer was told is not known
            self._fail(f"{PartialMessage.INTERRUPTED}: {e!r}")
            raise

    def _poll(self, is_done: Callable[[], bool], check: Callable[[], object], deadline: Deadline) -> bool:
        """Wait until ``is_done()``; return False at the deadline. ``check``, called in between, may raise."""
        backoff = Backoff()
        while not is_done():
            check()
            if deadline.expired:
                return False
            backoff.pause()
        return True

    # -- how it ends -------------------------------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        self._coming.stop()
        if threading.current_thread() is self._worker:
            return  # in a transfer's callback: nothing is sent while it waits
        if self._window.drain(deadline):
            with contextlib.suppress(BusyError):  # of a signal handler whose thread is sending
                self._tell("goodbye", True)

    def _release(self) -> None:
        """The worker, which is woken, gives everything back."""
        is_revoked = self._revoke()
        self._coming.stop()
        self._end_sending(is_revoked)

    def _on_peer_gone(self) -> None:
        is_revoked = self._revoke()
        self._coming.end(self._survives)
        self._end_sending(is_revoked)

    def _end_sending(self, is_revoked: bool) -> None:
        with self._lock:
            self._window.end()
        self._wake()
        if is_revoked:
            self._fail_transfers()

    def _join_threads(self) -> None:
        if threading.current_thread() is not self._worker:
            self._worker.join(_JOIN_S)

    def _release_in_child(self) -> None:
        # The channel closes itself.
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        with self._lock, no_fork:
            for fd in (self._pidfd, self._wake_fd):
                if fd is not None:
                    os.close(fd)
            self._pidfd = self._wake_fd = None

    def _wake(self) -> None:
        """Wake the worker."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    # -- the worker --------------------------------------------------------------------------------------

    def _tell(self, kind: str, *content: Any) -> None:
        """Send the peer a value. Any thread, maybe with the lock."""
        try:
            self.channel.send([kind, *content], timeout=_SEND_S)
        except (ClosedError, PeerGoneError, WireError):
            pass  # the worker notices it, and ends the pipe
        except TimeoutError as e:
            self._lifecycle.fail(f"the peer does not read: {e}")  # the worker ends it
            self._wake()

    def _work(self) -> None:
        if not self._runs.get():
            return
        try:
            self._device.adopt()
            self._serve()
        except PeerGoneError as e:
            with contextlib.suppress(SystemExit):  # of a callback
                self._peer_gone(str(e))
        except ClosedError:
            pass
        except WireError as e:
            self._fail(f"the peer sent what cannot be: {e}")
        except KvplugError as e:
            self._fail(str(e))
        except BaseException as e:  # a callback may raise SystemExit, which would end the thread in silence
            if not self._let_go:
                self._fail(f"its thread failed: {e!r}")
        finally:
            try:
                self._give_back()
            except KvplugError as e:
                self._logger.warning("%r: not everything was given back: %s", self, e)
            finally:
                self.channel.close()
                self._close_descriptors()
                self._stream.close()

    def _serve(self) -> None:
        """Until the pipe has ended."""
        silence_s = self._silence_s
        interval_s = _POLL_S if silence_s is None else silence_s / Watch.Terms.BEATS_PER_TIMEOUT
        last_received = next_beat = time.monotonic()
        backoff, is_busy = Backoff(), False
        while not self._window.ended:
            if is_busy:
                backoff.pause()
            may_read = self._await_event(0 if is_busy else max(0.0, next_beat - time.monotonic()))
            looked = time.monotonic()
            if may_read and self._read():
                last_received = time.monotonic()  # not before: this process may have been stopped
                backoff.reset()
            was_busy, is_busy = is_busy, self._step()
            if not was_busy:
                backoff.reset()
            if silence_s is not None and looked - last_received >= silence_s:
                raise PeerGoneError(f"silent for {looked - last_received:.1f} s")
            if looked >= next_beat:
                next_beat = looked + interval_s
                self._look()
                if silence_s is not None:
                    self._tell("heartbeat")
            if self._lifecycle.broken:
                self._end()

    def _await_event(self, seconds: float) -> bool:
        """Wait until the peer sends something or has ended, :meth:`_wake` is called, or time is up. Return
        whether to :meth:`_read`."""
        ready = [fd for fd, _ in self._poller.poll(1000 * seconds)]
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            ready.remove(self._wake_fd)
        return bool(ready)

    def _read(self) -> bool:
        """Handle the next value, if it has arrived. Return whether it had. One at a time: a look for another
        would hold up the thread that this one has woken."""
        try:
            value = self.channel.recv(0)
        except TimeoutError:
            return False
        self._handle(value)
        return True

    def _handle(self, value: Any) -> None:
        match value:
            case ["offer", bytes(prefix), int(nbytes), place]:
                self._coming.add(prefix, nbytes, lambda meta: self._read_place(meta, nbytes, place))
            case ["taken", int(count)]:
                with self._lock:
                    left = len(self._announced) - self._num_taken
                    if not 0 < count <= left:
                        raise WireError(f"it has taken {count} offers where {left} were left")
                    self._num_taken += count
                self._settle()
            case ["heartbeat"]:
                pass
            case ["goodbye", bool(is_closed)]:
                self._on_goodbye(is_closed)
            case [str(kind), *content]:
                self._on_value(kind, content)
            case _:
                raise WireError(f"it sent a value that the pipe {self.NAME!r} does not know")

    def _on_goodbye(self, is_closed: bool) -> None:
        if self._coming.end(self._survives):
            self._lifecycle.lose_peer("it ended before its messages were taken")
        else:
            self._lifecycle.lose_peer(
                DuplexPipe.Lifecycle.CLOSED_BY_PEER if is_closed else "it ended the pipe"
            )
        self._on_peer_gone()

    def _give_back(self) -> None:
        """In the worker, at the end: give everything back, except what the peer has to agree to."""
        with self._moving:
            self._free()
            if self._incoming is not None and not self._incoming.is_complete:
                self._incoming = None


def _is_done(mark: Mark | None) -> bool:
    return mark is None or mark.is_done()


def _meta_of(prefix: bytes) -> TensorMeta | None:
    """Return the tensor that a prefix announces, or ``None`` if the message is ``None``."""
    try:
        announcement = read_prefix(prefix)
    except UnsupportedError as e:
        raise WireError(str(e)) from e
    if announcement.goodbye or announcement.flags:
        raise WireError("a prefix that no message of an offer has")
    return announcement.meta
