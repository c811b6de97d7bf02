"""The base of pipes whose sender offers messages, and whose receiver moves them out of the sender's memory.

    queued -> offered, once the device has written it -> moved by the receiver -> taken

A message consists of one or more *offers*. An offer names the *place* of some bytes of the message, in a form
that the transport defines. The first offer also announces the message. The ends send each other these values
over a channel:

    offer      prefix, number of bytes, place: these bytes can be moved
    taken      how many offers were moved: their memory belongs to the sender again
    heartbeat  this end is alive
    goodbye    this end sends nothing more. True: it was closed, and the peer has taken everything

A transport may add values of its own. One thread per pipe, the worker, receives the values, announces offers
that become ready, and notices the peer's end. Callers queue messages, and move what they receive, in their
own threads.
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
from contextlib import AbstractContextManager
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
from kvplug.transport.pipe.device import Mark, PipeStream, TensorDevice
from kvplug.transport.pipe.join import PipeJoin
from kvplug.transport.pipe.partial import PartialMessage
from kvplug.transport.pipe.pipe import DuplexPipe
from kvplug.transport.pipe.transfer import SendWindow, Transfer

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S: Final = 1.0
"""How often an idle worker checks the pipe's state, in seconds."""
_MOST_VALUES: Final = 32
"""How many values the worker handles before it does its other work, so that a busy peer does not prevent its
heartbeats."""
_SEND_S: Final = 5.0
"""Seconds that the peer may take to read a value. The connection has room for all values that may be
unread."""
_JOIN_S: Final = 1.0
"""Seconds that ``close`` waits for the worker to release everything."""
_COPY_S: Final = 5.0
"""Seconds that a call waits at its end for a copy on the device. Only a device that hangs takes longer."""
_SPIN_S: Final = 50e-6
_SPIN_BYTES: Final = 256 * 1024
"""The sender of a message of up to this size waits up to ``_SPIN_S`` for the device: waking the worker would
take longer."""


class Backoff:
    """The pauses of one polling wait: none for 100 µs, then longer and longer ones, up to 1 ms."""

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
        """How many of its bytes are in offers."""
        self.is_copied = content.is_copy or not content.nbytes
        """Whether the caller may overwrite the tensor as soon as the whole message is announced. Otherwise
        the tensor must stay unchanged until the message is taken."""
        self.place: Any = None
        """For the transport's own use."""

    def drop_tensors(self) -> None:
        """Release the caller's tensors: the bytes of the message were copied."""
        self.content = Content(self.content.prefix, self.content.nbytes)


@attrs.define(eq=False)
class Offer:
    """Bytes of a message that this end sends, and that the peer may move once they are ready."""

    message: SentMessage
    nbytes: int
    ready: Mark | None
    """Passed when the device has written the bytes; ``None`` if they are already written."""
    place: Any = None
    """The place of the bytes, for the peer."""
    is_first: bool = True
    is_last: bool = True
    work: Any = None
    """The operation that moves the bytes, if this end moves them."""


@attrs.frozen(eq=False)
class ComingOffer:
    """Bytes of a message that the peer offers."""

    meta: TensorMeta | None
    """Describes the whole message; only in its first offer."""
    nbytes: int
    place: Any


class ComingMessage(PartialMessage):
    """The message that is being received."""

    __slots__ = ("place", "state")

    def __init__(self, first: ComingOffer) -> None:
        super().__init__(first.meta)
        self.place: Any = first.place
        """The place in the first offer of the message."""
        self.state: Any = None
        """For the transport's own use, when a call resumes the message."""

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are in this end's memory, so that the peer is not needed."""
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
        """Bytes of the last message that were not offered yet."""
        self._incomplete = 0
        """How many offers belong to a message whose other bytes were not offered yet."""
        self._no_more = False
        self._stopped = False

    def add(self, prefix: bytes, nbytes: int, read_place: Callable[[TensorMeta | None], Any]) -> None:
        """Add an offer of the peer.

        Raises:
            WireError: the offer contradicts earlier ones, or there are too many.
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
        """Expect no more offers. Keep the offers of whole messages, up to the first offer that does not
        survive. Return whether any offers were dropped, or the last message was only partly offered."""
        with self._lock:
            self._no_more = True
            whole = list(self._offers)[: len(self._offers) - self._incomplete]
            kept = next((at for at, each in enumerate(whole) if not survives(each)), len(whole))
            dropped = len(self._offers) - kept
            self._offers = deque(whole[:kept])
            self._incomplete = 0
            self._changed.notify_all()
            return dropped > 0 or self._missing > 0

    def stop(self) -> None:
        """Refuse to hand out more offers, and wake the threads that wait for one."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """Check that offers can still be taken.

        Raises:
            KvplugError: no more offers can be taken; the error says why.
        """
        if self._stopped or self._lifecycle.broken or (self._no_more and not self._offers):
            raise self._lifecycle.error()

    def oldest(self, deadline: Deadline) -> ComingOffer | None:
        """Wait for an offer and return it, but do not remove it. Return ``None`` if no offer came in time.
        Raises as :meth:`check`."""
        with self._lock:
            self.check()
            while not self._offers:
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    return None
                self.check()
            return self._offers[0]

    def after(self, count: int) -> list[ComingOffer]:
        """Return all offers except the oldest ``count``."""
        with self._lock:
            return list(self._offers)[count:]

    def take(self, count: int) -> None:
        """Remove the oldest ``count`` offers, or all if :meth:`end` has left fewer."""
        with self._lock:
            for _ in range(min(count, len(self._offers))):
                self._offers.popleft()
            self._incomplete = min(self._incomplete, len(self._offers))
            self._changed.notify_all()

    def wait(self, deadline: Deadline) -> None:
        """Wait until an offer comes or is taken, or the pipe ends."""
        with self._lock:
            self._changed.wait(deadline.remaining())

    def wait_until_taken(self, deadline: Deadline) -> None:
        """Wait until all offers are taken, or :meth:`stop` is called."""
        with self._lock:
            while self._offers and not self._stopped and not deadline.expired:
                self._changed.wait(deadline.remaining())


class OfferPipe(DuplexPipe):
    """The base of pipes that move messages out of the sender's memory; see this module's docstring.

    Law of order on a device. A sent message contains the results of all work that was queued earlier on the
    caller's current stream. The call sets a mark on that stream, and the message is offered when the device
    has passed the mark; the caller does not wait for it. A receive writes the caller's memory only after the
    work that was queued earlier on the caller's current stream. Work that the caller queues on that stream
    afterwards sees the message. No work on a device waits for the peer.

    A subclass sets :attr:`NAME`, calls :meth:`_start` once initialised, and implements :meth:`_move`. It
    may override the other methods below "what a transport writes".
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
    """A pipe that is being made."""
    Offer: TypeAlias = Offer
    """Bytes of a message that this end offers."""
    SentMessage: TypeAlias = SentMessage
    """A message that this end sends."""
    Mark: TypeAlias = Mark
    """A point in the work of a device."""
    Stream: TypeAlias = PipeStream
    """A stream that only one pipe uses."""
    bytes_of = staticmethod(bytes_of)
    spans_of = staticmethod(spans_of)
    cut = staticmethod(cut)

    NAME: ClassVar[str]
    """The transport's name, for messages and the worker's thread."""
    MAX_OFFERS: ClassVar[int] = 64
    """The most offers that may wait to be taken. This bounds the memory of a peer that does not receive."""
    MAX_RUNS: ClassVar[int] = 1024
    """Blocks of more layers than this are gathered and scattered. Others are moved in place."""

    AWAITS_DEVICE: ClassVar[bool] = False
    """Whether a receive into new memory also waits for the caller's stream. For a transport without streams
    of its own: it waits for its copies, and a busy device would delay them."""

    @attrs.frozen(kw_only=True)
    class Settings(DuplexPipe.Settings):
        """The settings from the endpoint's context and options. A transport adds its own."""

        device: TensorDevice
        """The device of the tensors."""
        max_in_flight_bytes: int
        """The most bytes that may be sent before the peer takes them."""
        copy_bytes: int = 0
        """Messages of up to this size are copied when they are sent."""

    def __init__(self, join: PipeJoin, settings: Settings) -> None:
        """The pipe owns the channel and the pidfd of ``join`` once :meth:`_start` has returned.

        Raises:
            TransportError, ResourceExhaustedError: no stream or descriptor is free.
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
        """Guards the messages in both directions. Re-entrant: a signal handler may abort the pipe while its
        thread holds the lock."""
        self._queue: deque[SentMessage] = deque()
        """Messages that are not wholly in offers yet."""
        self._pending: deque[Offer] = deque()
        """Offers that are not announced yet."""
        self._announced: deque[Offer] = deque()
        """Offers that are announced and still in use."""
        self._num_taken = 0
        """How many of the announced offers the peer has taken."""
        self._unresolved: dict[int, SentMessage] = {}
        """Messages whose transfers have not ended, by identity."""
        self._coming = _ComingOffers(self._lock, self._lifecycle, self.MAX_OFFERS)
        self._incoming: ComingMessage | None = None
        self._moving = threading.Lock()
        """Held while the peer's memory is in use."""
        self._hung: list[object] = []
        """Memory that a hung device may still write to."""
        self._wake_fd: int | None = None
        with contextlib.ExitStack() as undo:
            self._stream = settings.device.new_stream()
            """For copies of received messages. Only this pipe uses it."""
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
        """Start the worker. If it cannot be started, the join still owns the channel and the pidfd.

        Raises:
            ResourceExhaustedError: no thread is free.
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
        """Prepare the memory of a message that is about to be queued. Called in the caller's thread, without
        locks."""

    def _next_offer(self, message: SentMessage) -> Offer | None:
        """Return the next offer of a message, or ``None`` if there is no room for one now. Called with the
        lock held.

        By default the message is offered as a whole, when its content is ready.
        """
        return Offer(message, message.content.nbytes, message.content.ready, message.place)

    def _place_of(self, offer: Offer) -> Any:
        """Return the place of an offer that is about to be announced. Called with the lock held."""
        return offer.place

    def _is_unused(self, offer: Offer) -> bool:
        """Whether this end's device no longer uses the memory of an offer that the peer has taken. Called
        with the lock held.

        Raises:
            WireError: the peer cannot have taken the offer.
        """
        return True

    def _taken_back(self, offer: Offer) -> None:
        """Reclaim the memory of an offer, which belongs to this end again. Called with the lock held."""

    def _forget(self, message: SentMessage) -> None:
        """Release the transport's data for a message that was taken or will not be queued. The lock may be
        held."""

    def _read_place(self, meta: TensorMeta | None, nbytes: int, place: Any) -> Any:
        """Convert the place in an offer of the peer to the form that :meth:`_move` uses. ``meta`` is ``None``
        except in the first offer of a tensor.

        Raises:
            WireError: the place is not valid.
        """
        if place is not None:
            raise WireError("it names a place, but this transport does not use places")

    def _carried(self, message: ComingMessage) -> Tensor | None:
        """Return the message as a new tensor if its offer carries the bytes, else ``None``: then
        :meth:`_move` moves it."""
        return None

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
        the bytes in ``message.got``. Call :meth:`_take` for each offer. Called in the caller's thread.

        Returns False at the deadline. When it returns or raises, nothing may write to ``memory`` any more.
        The exception: if it returns and ``in_place`` is False, writes may continue until the next call
        resumes.

        Raises:
            KvplugError: the pipe has ended or fails, or its memory cannot be used.
        """

    def _on_value(self, kind: str, content: list[Any]) -> None:
        """Handle a value that only this transport sends. Called in the worker.

        Raises:
            WireError: the transport does not send such a value.
        """
        raise WireError(f"it sent a value that the pipe {self.NAME!r} does not know")

    def _step(self) -> bool:
        """Do the work that is possible now, without waiting. Called in the worker. Return whether to call
        this again soon."""
        if self._pending:
            self._announce()
        if self._num_taken:
            self._settle()
        return bool(self._pending or self._num_taken)

    def _look(self) -> None:
        """Check that the transport still works. Called in the worker from time to time."""

    def _revoke(self) -> bool:
        """Keep the peer from reading the memory of messages that were not taken, because this end is about to
        reuse it. Called in any thread; must not wait. Idempotent.

        Return False if that takes time. The transport then calls :meth:`_fail_transfers` when it is done.
        """
        return True

    def _free(self) -> None:
        """Release the transport's resources. Called in the worker at the end, when no call uses them."""

    # -- sending -----------------------------------------------------------------------------------------

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        with self._on_device():
            content = Content.of_tensor(tensor, self._device, self._copy_bytes)
            return self._send(content, self._deadline(timeout))

    def _send_blocks(self, blocks: Blocks, timeout: Timeout) -> Transfer:
        with self._on_device():
            content = Content.of_blocks(blocks, self._device, self.MAX_RUNS, self._copy_bytes)
            return self._send(content, self._deadline(timeout))

    def _on_device(self) -> AbstractContextManager[Any]:
        if self._device.is_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured on this stream, and messages of a pipe cannot be part of one"
            )
        return self._device.current()

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
            if is_queued:  # Ctrl-C, or the device failed: how much was sent is not known
                self._fail(f"a message was not sent: {e!r}")
            else:
                self._forget(message)
            raise
        if self._pending:
            self._wake()
        return message.transfer

    def _make_offers(self) -> None:
        """Make the offers that there is room for. Called with the lock held."""
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
            self._unresolved.pop(id(message), None)  # only now: a forked child fails the messages left here

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
            except BaseException as e:  # Ctrl-C, or raised by a callback; the other transfers must fail too
                interrupted = e
            self._unresolved.pop(key, None)  # only now: a forked child fails the messages left here
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
                elif (carried := self._carried(message)) is not None:
                    if target.is_new:
                        self._limit.check(message.nbytes, self._peer)
                    message.own, message.got = carried, message.nbytes
                    self._incoming = message
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
        return ComingMessage(offer)

    def _new_tensor(self, meta: TensorMeta) -> Tensor:
        return self._device.empty(meta, self._stream)

    def _fill(self, message: ComingMessage, target: Target, deadline: Deadline) -> bool:
        """Move the rest of a message. Return whether it went into the caller's memory."""
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
        """Copy the bytes that have arrived out of the caller's memory, since the caller may use it after
        this."""
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
        """Run a block that queues copies on the pipe's own stream, and wait for the copies at its end."""
        with self._stream.current():
            yield
            copied = self._device.now(memory[0].device)
        if copied is not None and not self._poll(copied.is_done, lambda: None, Deadline.after(_COPY_S)):
            self._hung.append(memory)
            raise TransportError("a copy on the device does not end")

    def _take(self, count: int = 1) -> None:
        """Inform the peer that the oldest ``count`` offers were moved."""
        try:
            self._coming.take(count)
            self._tell("taken", count)
        except BaseException as e:  # Ctrl-C: whether the value was sent is not known
            self._fail(f"{PartialMessage.INTERRUPTED}: {e!r}")
            raise

    def _poll(self, is_done: Callable[[], bool], check: Callable[[], object], deadline: Deadline) -> bool:
        """Wait until ``is_done()``. Return False at the deadline. ``check`` is called between polls, and may
        raise."""
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
            return  # in a transfer's callback: the worker sends nothing while the callback waits
        if self._window.drain(deadline):
            with contextlib.suppress(BusyError):  # in a signal handler whose thread is sending
                self._tell("goodbye", True)

    def _release(self) -> None:
        """Wake the worker, which releases everything."""
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
        """Send the peer a value. Called in any thread; the lock may be held."""
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
            with contextlib.suppress(SystemExit):  # raised by a callback
                self._peer_gone(str(e))
        except ClosedError:
            pass
        except WireError as e:
            self._fail(f"the peer sent an invalid value: {e}")
        except KvplugError as e:
            self._fail(str(e))
        except BaseException as e:  # a callback may raise SystemExit, which would end the thread silently
            if not self._let_go:
                self._fail(f"its thread failed: {e!r}")
        finally:
            try:
                self._give_back()
            except KvplugError as e:
                self._logger.warning("%r: could not release all resources: %s", self, e)
            finally:
                self.channel.close()
                self._close_descriptors()
                self._stream.close()

    def _serve(self) -> None:
        """Run the worker's loop until the pipe has ended."""
        silence_s = self._silence_s
        interval_s = _POLL_S if silence_s is None else silence_s / Watch.Terms.BEATS_PER_TIMEOUT
        last_received = next_beat = time.monotonic()
        backoff, is_busy = Backoff(), False
        may_read = self.channel.has_more  # a value that came together with the last one of the join
        while not self._window.ended:
            if is_busy:
                backoff.pause()
            seconds = 0 if is_busy or may_read else max(0.0, next_beat - time.monotonic())
            may_read |= self._await_event(seconds)
            looked = time.monotonic()
            for _ in range(_MOST_VALUES):
                if not may_read or self._window.ended:
                    break
                if may_read := self._read():
                    last_received = time.monotonic()  # not before: this process may have been stopped
                    backoff.reset()
                    may_read = self.channel.has_more
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
        """Handle the next value if it has arrived, and return whether it had. The caller does not poll the
        socket for another value, since that would delay the thread that this value has woken."""
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
        """Release everything at the end, in the worker, except memory that the peer may still use."""
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
