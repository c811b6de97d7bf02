"""The pipe: ordered, point-to-point tensors between two processes, full duplex.

A transport of kind "pipe" implements :class:`PipeEndpoint` (and the :class:`PipeListener` and
:class:`Pipe` it hands out). ``Tensor`` below is ``torch.Tensor``; this module does not import torch.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvplug.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.errors import BusyError, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Transfer:
    """One ``send_tensor`` under way. It always ends, in success or in an error.

    Thread-safe. The transport calls :meth:`finish` or :meth:`fail` exactly once; users wait.
    """

    # Most transfers of small messages have ended before anybody asks, so the event that a waiter needs
    # is made by the first waiter.
    __slots__ = ("__weakref__", "_callbacks", "_done", "_error", "_event", "_lock", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._done = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []

    def __repr__(self) -> str:
        state = "under way" if not self.done() else f"failed: {self._error}" if self._error else "done"
        return f"<Transfer of {self.nbytes} bytes, {state}>"

    def done(self) -> bool:
        """Whether it has ended. From then on the caller may overwrite the tensor it sent."""
        return self._done

    def error(self) -> BaseException | None:
        """What it failed with; ``None`` while under way and after success."""
        return self._error

    def wait(self, timeout: Timeout = None) -> None:
        """Return when the transfer has succeeded.

        Raises:
            TimeoutError: it is still under way.
            KvplugError: what it failed with.
        """
        deadline = Deadline.after(timeout)
        with self._lock:
            if not self._done and self._event is None:
                self._event = threading.Event()
        if not self._done and self._event is not None and not self._event.wait(deadline.remaining()):
            raise TimeoutError(f"a transfer of {self.nbytes} bytes is still under way after {timeout} s")
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(self)`` once it has ended: at once if it has, else in the thread that ends it."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self) -> None:
        """For transports: it succeeded."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """For transports: it failed, and why."""
        self._end(error)

    def inherit(self, error: BaseException) -> None:
        """For transports, in a forked child: it is the parent's, and here it has failed with ``error``.

        Takes no lock made before the fork. The callbacks are the parent's too, and are not called here.
        """
        self._lock = threading.Lock()
        self._callbacks = []
        if not self._done:
            self._error = error
            self._done = True

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            if self._event is not None:
                self._event.set()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # it runs in a transport's thread, which others depend on
                logger.exception("a callback of %r failed", self)


class Turn:
    """One direction of an endpoint: whoever is second gets :class:`BusyError` instead of a mixed stream."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()

    def taken(self) -> Turn:
        """For a ``with`` statement around the whole call.

        Raises:
            BusyError: another thread is inside one.
        """
        return self

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError(f"another thread is already {self._what}; one thread sends, one receives")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Pipe(abc.ABC):
    """Ordered tensors to and from one peer.

    Law. Tensors arrive whole, in order, exactly once, with shape, dtype and bits unchanged: every
    torch dtype, 0-d, empty and non-contiguous tensors, and ``None``, which is a message too. When the
    peer dies every call raises ``PeerGoneError``, also one already blocked; messages that had wholly
    arrived may be received first, never part of one. A peer on this host that is stopped or busy is
    alive: calls raise ``TimeoutError``. Every transfer that was started ends.

    Callers. Connectors and lookup buffers. One thread may send while one other receives; a second
    thread in the same direction gets ``BusyError``. ``close`` and ``abort`` may come from any thread.

    Not promised. Delivery once the sender has been told ``done()``: it means that the source may be
    overwritten, not that the peer has read the message. Nothing is retried.
    """

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether ``close`` or ``abort`` was called here."""

    @property
    @abc.abstractmethod
    def peer(self) -> str:
        """Who is at the other end, for messages; pid and host where known."""

    @abc.abstractmethod
    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        """Queue one message and return at once, unless ``max_in_flight_bytes`` are unsent: then block.

        One message larger than that limit passes alone. The pipe keeps ``tensor`` alive; the caller
        may overwrite it once the transfer is done.

        Raises:
            TimeoutError: there was no room in time; nothing was queued.
            PeerGoneError, ClosedError, BusyError: as the law says.
            UnsupportedError: the tensor's device or dtype is not carried; nothing was queued.
        """

    @abc.abstractmethod
    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        """The next message. With ``out`` it is received into that memory, and ``out`` is returned.

        ``out`` must have the message's shape and dtype and may be non-contiguous.

        Raises:
            TensorMismatchError: ``out`` does not fit, or the message is ``None`` and ``out`` was given;
                the message stays and can be received by another call.
            TimeoutError: nothing (or not all) arrived in time. Nothing is lost: the next call gets the
                message, or goes on with it; or the pipe is broken and says so. It is never skipped.
            PeerGoneError, ClosedError, BusyError: as the law says.
        """

    @abc.abstractmethod
    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send what is queued within ``timeout``, then end. Idempotent. Never raises for a dead peer."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End at once: what is queued fails with ``ClosedError``. Idempotent, never blocks."""

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: object, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class PipeListener(abc.ABC):
    """Waits for peers. Each ``accept`` is one more pipe; peers come and go while others work."""

    @property
    @abc.abstractmethod
    def contact(self) -> str:
        """A short opaque string, for one ``connect`` or many. May carry a token: do not log it."""

    @abc.abstractmethod
    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """The pipe to the next peer that has connected and proved itself.

        Raises:
            TimeoutError: nobody came.
            ClosedError: the listener is closed (also when that happens during the wait).
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening; accepted pipes live on. Idempotent."""


class PipeEndpoint(abc.ABC):
    """What a pipe transport's factory returns: the two verbs a transport implements."""

    @abc.abstractmethod
    def listen(self) -> PipeListener:
        """Start to listen where the context says.

        Raises:
            AddressInUseError, InsecureAddressError, TransportError: it cannot, and why.
        """

    @abc.abstractmethod
    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """A pipe to the listener that gave out ``contact``.

        Raises:
            TimeoutError: it did not answer in time.
            PeerGoneError: nobody listens there any more.
            AuthenticationError: one end did not prove itself to the other.
            WireError: the contact is not one of this transport's.
        """
