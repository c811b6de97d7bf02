"""Sends small plain values in frames over a proven connection. The handshake and groups use it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
from typing import Any, Self

from kvplug.errors import (
    BusyError,
    CapacityError,
    ClosedError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    WireError,
)
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exclusive_use import ExclusiveUse
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork, no_fork
from kvplug.net.trust.connection import Connection, decline, shortage_in
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire import values
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, decode_header, encode_header

MAX_FRAME_BYTES = 16 << 20
"""Limit for one encoded value."""
_SMALL_FRAME = 512
"""One system call receives up to this many bytes of small values."""
_LAST_WORDS_S = 0.2  # within this time, a dead peer's last bytes have reached our buffer
_MAX_POLL_MS = 2**31 - 1


class Channel:
    """Carries values both ways, whole, in order and exactly once.

    Law. When the peer ends, every call raises ``PeerGoneError``, even a call already blocked, and even while
    a forked child of the peer keeps the socket open (a pidfd shows it). Values that have wholly arrived may
    be received first. Bytes that are not a frame raise ``WireError`` and break the channel: from then on both
    directions raise it. ``close`` wakes calls blocked in other threads with ``ClosedError``.

    Callers. Any threads. Senders take turns. A second receiver gets ``BusyError``, and so does a signal
    handler that sends while its thread is sending.

    Not promised. That the peer has read the sent values. TCP's own probes notice a vanished peer on another
    host if the connection is idle (after about 11 s); otherwise the call's deadline does.
    """

    def __init__(self, connection: Connection, *, timeout_s: float | None = 30.0) -> None:
        """Takes over ``connection``, even if this raises. ``timeout_s`` is the default timeout of its calls.

        Raises:
            ResourceExhaustedError: the process has no free descriptor to watch the peer.
        """
        self._sock = connection.sock
        self._who = connection.describe
        self._timeout_s = timeout_s
        self.peer: PeerIdentity = connection.peer
        """The process at the other end."""
        self.address: str = connection.address
        """The listener's address."""
        self.since: float = connection.since
        """When both ends had proved themselves, by ``time.monotonic``."""
        self.purpose = connection.purpose
        """The purpose that both ends have proved."""
        self._closed = False
        self._broken: WireError | None = None
        self._turn = threading.RLock()
        """Held by the sending thread. Re-entrant, so that only its owner can release it."""
        self._sending = ExclusiveUse("sending to this channel")
        self._receiving = ExclusiveUse("receiving from this channel")
        self._closing = threading.RLock()
        self._unsent = memoryview(b"")
        self._frame = bytearray()
        """The frame being received: a header, then its payload. The first ``_filled`` bytes have arrived, and
        may include later frames."""
        self._filled = 0
        self._has_received = False
        self._sock.setblocking(False)
        self._dead = False
        self._ended = False
        self._pidfd: int | None = None
        try:
            with no_fork:
                close_after_fork(self)
                self._pidfd = connection.peer.open_pidfd()
        except PeerGoneError:
            self._dead = True
        except BaseException as e:
            if isinstance(e, ResourceExhaustedError):
                self.decline(e)
            connection.close()
            raise

    def __repr__(self) -> str:
        return f"<Channel to {self._who}{', closed' if self._closed else ''}>"

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called here."""
        return self._closed

    @property
    def unsent(self) -> int:
        """Bytes left of a value that ``send`` had begun but not finished when its deadline passed."""
        return len(self._unsent)

    def fileno(self) -> int:
        """Return the socket's descriptor for a watcher; -1 once closed."""
        return self._sock.fileno()

    @property
    def has_more(self) -> bool:
        """Whether bytes after the last value have been read already. A watcher of :meth:`fileno` does not see
        them: call :meth:`recv` again first."""
        return self._filled > 0

    def socket(self) -> socket.socket:
        """Return the socket for ``Watch(sock=…)``. Callers must not read or write it."""
        return self._sock

    # -- sending -------------------------------------------------------------------------------

    def send(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send one value of a type that :mod:`kvplug.net.wire.values` supports.

        Raises:
            TimeoutError, ResourceExhaustedError: the peer does not read, or the kernel lacks memory for the
                value. If ``unsent == 0``, no byte of it was sent. Otherwise the value was begun, and
                ``flush`` or the next ``send`` finishes it first: do not send it again.
            UnsupportedError, CapacityError: its type is not supported, or it is too large; nothing was sent.
            BusyError: this is a signal handler, and its thread is in the middle of sending.
            ResourceExhaustedError: the peer has declined the channel.
            PeerGoneError, ClosedError, WireError: see the law of this class.
        """
        data = values.encode(value)
        if len(data) > MAX_FRAME_BYTES:
            raise CapacityError(
                f"the value has {len(data)} bytes, but a channel carries at most {MAX_FRAME_BYTES}"
            )
        frame = memoryview(encode_header(FrameKind.VALUE, len(data)) + data)
        self._send_in_turn(frame, Deadline.after(timeout, self._timeout_s))

    def flush(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Finish a value that a ``send`` has begun. Raises as ``send`` does."""
        self._send_in_turn(None, Deadline.after(timeout, self._timeout_s))

    def decline(self, shortage: ResourceExhaustedError) -> None:
        """Notify the peer that this process lacks the resources to serve it. The peer's calls raise
        ``ResourceExhaustedError`` once it has received all earlier values, and it may try again with a new
        channel. Close this channel afterwards. Never waits or raises.
        """
        if self._turn.acquire(blocking=False):
            try:
                if not self._unsent and not self._closed:
                    decline(self._sock, shortage)
            finally:
                self._turn.release()

    def _send_in_turn(self, frame: memoryview | None, deadline: Deadline) -> None:
        remaining = deadline.remaining()
        seconds = -1 if remaining is None else min(remaining, threading.TIMEOUT_MAX)
        turn = self._turn
        try:
            is_ours = turn.acquire(timeout=seconds)
        except BaseException:  # Ctrl-C, perhaps just after the lock was acquired
            with contextlib.suppress(RuntimeError):
                turn.release()
            raise
        if not is_ours:
            self._check()
            raise TimeoutError(f"another thread was still sending to {self._who} when the deadline passed")
        # No signal is handled between the acquisition above and this one, which is released in any case.
        with turn:
            turn.release()
            try:
                with self._sending.taken():  # raises in a signal handler whose thread is already sending
                    self._check()
                    if frame is not None and (self._ended or self._is_dead()):
                        self._check_last_word()
                        raise self._gone(None)
                    self._flush(deadline)
                    if frame is not None:
                        self._unsent = frame
                        self._flush(deadline)
            except (TimeoutError, ResourceExhaustedError):
                if self._unsent is frame:  # no byte of it was sent
                    self._unsent = memoryview(b"")
                raise
            finally:
                self._close_if_unused()

    def _flush(self, deadline: Deadline) -> None:
        while self._unsent:
            self._check()
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
                continue
            except BlockingIOError:
                pass
            except OSError as e:
                NamedExhaustion.check(e, f"sending to {self._who}")
                self._check_last_word()
                raise self._gone(e) from e
            if not self._wait(select.POLLOUT, deadline):
                begun = f"; {len(self._unsent)} bytes of a value remain"
                raise TimeoutError(f"{self._who} did not read the sent values in time{begun}")

    # -- receiving -----------------------------------------------------------------------------

    def recv(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """Receive the next value.

        Raises:
            TimeoutError: it has not, or not wholly, arrived; the next call continues with it.
            WireError: the received bytes are not a frame or not a value; the channel is broken.
            ResourceExhaustedError: there is no memory for it, and the next call continues with it; or the
                peer has declined the channel.
            BusyError: another thread is receiving.
            PeerGoneError, ClosedError: see the law of this class.
        """
        deadline = Deadline.after(timeout, self._timeout_s)
        try:
            with self._receiving.taken():
                self._check()
                value, nbytes = self._next(deadline)
                self._has_received = True
                self._frame = self._frame[nbytes : self._filled]
                self._filled = len(self._frame)
                return value
        finally:
            self._close_if_unused()

    def _next(self, deadline: Deadline) -> tuple[Any, int]:
        """Return the next value, and the size of its frame, without consuming it."""
        self._fill(HEADER_SIZE, deadline)
        try:
            header = decode_header(self._frame, max_length=MAX_FRAME_BYTES)
            if header.kind not in (FrameKind.VALUE, FrameKind.LACK):
                raise WireError(f"a {header.kind.name} frame where only values are expected")
            nbytes = HEADER_SIZE + header.length
            self._fill(nbytes, deadline)
            payload = memoryview(self._frame)[HEADER_SIZE:nbytes]
            if header.kind is FrameKind.LACK:
                raise shortage_in(bytes(payload), self._who)
            return values.decode(payload), nbytes
        except WireError as e:
            self._broken = WireError(
                f"{self._who} sent bytes that are not a value, so the channel is broken: {e}"
            )
            raise self._broken from e

    def check_not_declined(self, timeout: float = 0) -> None:
        """Check that the peer has not declined this channel, and does not within ``timeout``. Consumes no
        value.

        Raises:
            ResourceExhaustedError: the peer lacks a resource.
            WireError: the received bytes are not a frame or not a value.
        """
        try:
            gone = (TimeoutError, PeerGoneError, ClosedError, BusyError)
            with contextlib.suppress(*gone), self._receiving.taken():
                self._check()
                self._next(Deadline.after(timeout))
        finally:
            self._close_if_unused()

    def _check_last_word(self) -> None:
        """Raise if the peer declined the channel before it went; checked only if nothing was received yet."""
        if not self._has_received:
            self.check_not_declined()

    def _fill(self, nbytes: int, deadline: Deadline) -> None:
        """Receive until ``nbytes`` of the frame have arrived."""
        if len(self._frame) < nbytes:
            with NamedExhaustion("receiving a value"):
                longer = bytearray(max(nbytes, _SMALL_FRAME))
            longer[: self._filled] = self._frame[: self._filled]
            self._frame = longer
        view = memoryview(self._frame)
        while self._filled < nbytes:
            self._check()
            try:
                got = self._sock.recv_into(view[self._filled :])
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline):
                    part = f" ({self._filled} of {nbytes} bytes are here)" if self._filled else ""
                    raise TimeoutError(f"{self._who} sent nothing in time{part}") from None
                continue
            except OSError as e:
                NamedExhaustion.check(e, f"receiving from {self._who}")
                raise self._gone(e) from e
            if not got:
                # The stream may end before the pidfd becomes readable, and TCP would still accept later
                # sends.
                self._ended = True
                raise self._gone(None)
            self._filled += got

    # -- both ----------------------------------------------------------------------------------

    def _wait(self, event: int, deadline: Deadline) -> bool:
        """Wait until the socket may be ready, the peer has died or the channel is closed. Returns False at
        the deadline."""
        poller = select.poll()
        try:
            poller.register(self._sock, event)
        except ValueError:  # closed meanwhile
            self._check()
            raise
        pause = _LAST_WORDS_S if self._dead else deadline.remaining()
        if self._pidfd is not None and not self._dead:
            poller.register(self._pidfd, select.POLLIN)
        ready = dict(poller.poll(None if pause is None else min(math.ceil(pause * 1000), _MAX_POLL_MS)))
        self._check()
        if self._sock.fileno() in ready:
            return True
        if self._dead:
            raise self._gone(None)
        self._dead = bool(ready)  # check the socket again, since the kernel may still be delivering bytes
        return self._dead or not deadline.expired

    def _is_dead(self) -> bool:
        if not self._dead and self._pidfd is not None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            self._dead = bool(poller.poll(0))
        return self._dead

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the channel to {self._who} is closed")
        if self._broken is not None:
            raise self._broken

    def _gone(self, cause: OSError | None) -> Exception:
        if self._closed:
            return ClosedError(f"the channel to {self._who} is closed")
        middle = " in the middle of a value" if self._filled else ""
        why = f": {cause.strerror or cause}" if cause is not None else ""
        return PeerGoneError(f"{self._who} is gone{middle}{why}")

    def close(self) -> None:
        """Close the channel; values sent before still arrive. Idempotent; any thread or signal handler may
        call it."""
        with self._closing:
            if not self._closed:
                self._closed = True
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)  # wakes threads that poll it
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Close the descriptors once no call uses them, since a number must not be reused during a poll.

        Each call marks them as used before it checks whether the channel is closed.
        """
        if self._closed:
            with self._closing:
                if not (self._sending.busy or self._receiving.busy):
                    self._close_descriptors()

    def _close_descriptors(self) -> None:
        with no_fork:
            self._sock.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def _after_fork_in_child(self) -> None:
        self._closed = True
        self._close_descriptors()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
