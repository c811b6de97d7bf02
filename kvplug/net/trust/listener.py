"""A listener accepts connections, makes each one prove itself, and hands out the proven ones.

One thread per listener serves at most 64 unproven connections concurrently, and one origin cannot take all
places: see :mod:`kvplug.net.trust.strangers`. A connection that is silent, slow or sends garbage does not
delay others.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import selectors
import socket
import ssl
import threading
import time
from typing import Self

from kvplug.config.addresses import Address
from kvplug.errors import ClosedError, ResourceExhaustedError, TimeoutError, TransportError
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork, no_fork
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.addresses import BoundSocket
from kvplug.net.trust.challenge import Exchange, Mode, Refusal, RefusedError, admit
from kvplug.net.trust.connection import Connection, tune
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import PeerIdentity, encode_identity
from kvplug.net.trust.relay import plain_end
from kvplug.net.trust.strangers import (
    THIS_HOST,
    THIS_USER,
    FailureRate,
    Stranger,
    check_same_user,
    origin_of,
    to_drop,
)
from kvplug.net.trust.tls import ListenerTls

logger = logging.getLogger(__name__)

_PROOF_TIMEOUT_S = 5.0
"""How long a connection may take to prove itself."""
_MAX_UNPROVEN = 64
_MAX_WAITING = 1024  # proven, but not yet taken by accept()
_PAUSE_S = 0.1  # pause when the process is out of descriptors


class Listener:
    """Listens at one address for one purpose. Any thread may call any method.

    Made by :meth:`open`. :meth:`close` ends its thread. In a forked child the listener is closed.
    """

    def __init__(self, bound: BoundSocket, credentials: Credentials, purpose: str, label: str) -> None:
        """Owns ``bound`` from here on, even if this raises. For the other arguments see :meth:`open`."""
        self._bound = bound
        self._sock = bound.sock
        self._contact = str(bound.address)
        self._credentials = credentials
        self._purpose = purpose
        self._label = label
        self._mode = credentials.mode_at(bound.address)
        self._unproven: list[Stranger] = []
        """Oldest first."""
        self._failures = FailureRate()
        self._proven: collections.deque[Connection] = collections.deque()
        # Code takes the lock, not the condition: Ctrl-C inside the condition's ``__enter__`` would leave it
        # locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._refusals: collections.Counter[str] = collections.Counter()
        self._last_refusal: RefusedError | None = None
        self._shortage: ResourceExhaustedError | None = None
        """Why the latest connection could not be accepted, or ``None`` if it was."""
        with contextlib.ExitStack() as undo:
            undo.callback(bound.close)
            tls = None if bound.address.is_unix else credentials.tls
            self._tls = None if tls is None else ListenerTls(tls)
            with no_fork:
                self._wake_in, self._wake_out = socket.socketpair()
                self._selector = selectors.DefaultSelector()
                close_after_fork(self)
            undo.callback(self._wake_in.close)
            undo.callback(self._wake_out.close)
            undo.callback(self._selector.close)
            for s in (self._sock, self._wake_out):
                s.setblocking(False)
                self._selector.register(s, selectors.EVENT_READ)
            name = f"kvplug listener {self._contact}"
            self._thread = BackgroundThread(self._run, name=name, stop=self._stop)
            self._thread.start()
            undo.pop_all()

    @classmethod
    def open(
        cls, address: str | Address, credentials: Credentials, purpose: str, *, label: str = ""
    ) -> Listener:
        """Start to listen at ``host:port`` (port 0: any free port), ``unix:@name``, ``unix:`` (any name) or
        ``unix:/path``. The listener removes its path's file when it closes, and takes over a file left by a
        dead process.

        Without a secret, only this user's processes on this host can connect to a Unix socket. TCP needs a
        secret or TLS in ``credentials``, and uses TLS if given. The dialling end must name the same
        ``purpose``; ``label`` names this process to the dialling end.

        Raises:
            InsecureAddressError: it is a TCP address, and neither a secret nor TLS is set; nothing is bound.
            AddressInUseError: another process listens there. Names the address, and the process if known.
            TransportError: it cannot be bound for another reason.
            ResourceExhaustedError: the process has no free descriptor, or can start no more threads.
            ConfigError: it is not an address, or not an address of this host, or a TLS file cannot be used.
        """
        with NamedExhaustion(f"listening at {address}"):
            if isinstance(address, str):
                address = Address.parse(address)
            credentials.mode_at(address, "host")
            return cls(BoundSocket.listen(address), credentials, purpose, label)

    def __repr__(self) -> str:
        return f"<Listener at {self._contact} for {self._purpose!r}{', closed' if self._closed else ''}>"

    @property
    def contact(self) -> str:
        """The listener's address with its port: the argument of :meth:`Connection.dial`."""
        return self._contact

    @property
    def refusals(self) -> dict[str, int]:
        """How many connections were refused, by reason.

        "garbage": not kvplug, or another version of the challenge. "purpose": the client asked for another
        service. "credentials": a wrong secret or certificate, or one end has a secret or TLS and the other
        does not. "other user": another user of this host. "busy": too many connections, or a resource ran out
        here. "silent": the client did not prove itself in time, or hung up.
        """
        return dict(self._refusals)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called here, or this is a forked child."""
        return self._closed

    def accept(self, timeout: Timeout = None) -> Connection:
        """Return the next proven connection.

        Raises:
            TimeoutError: no connection proved itself in time. Counts the refused ones and chains the last
                refusal.
            ResourceExhaustedError: no connection proved itself in time, and the latest could not be accepted
                for lack of a resource. It may still be waiting.
            ClosedError: the listener is closed, or is closed during the wait.
        """
        deadline = Deadline.after(timeout, None)
        with self._lock:
            while not self._closed and not self._proven:
                if deadline.expired:
                    self.check_shortage()
                    raise TimeoutError(
                        f"no process connected to {self._contact} for {self._purpose!r} in"
                        f" time{self._turned_away()}"
                    ) from self._last_refusal
                self._changed.wait(deadline.remaining())
            if self._closed:
                raise ClosedError(f"the listener at {self._contact} is closed")
            return self._proven.popleft()

    def check_shortage(self) -> None:
        """Raise if the latest connection could not be accepted for lack of a resource. For callers that have
        waited for a connection in vain.

        Raises:
            ResourceExhaustedError: it could not be accepted.
        """
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            raise shortage

    def close(self) -> None:
        """Stop listening, and drop connections that are unproven or not yet accepted. Idempotent.

        On return the thread has ended and the descriptors are closed. Accepted connections stay open.
        """
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        """Make the thread end, and wake every thread that waits in ``accept``."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")

    def _after_fork_in_child(self) -> None:
        self._closed = True
        self._close_descriptors()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                pause = None
                if self._unproven:
                    pause = max(0.0, self._unproven[0].deadline - time.monotonic())
                for key, _ in self._selector.select(pause):
                    if key.fileobj is self._sock:
                        try:
                            self._take()
                        except Exception:  # such as being out of memory: the listener survives it
                            logger.exception("accepting a connection at %s failed", self._contact)
                    elif key.data in self._unproven:
                        self._proceed(key.data)
                self._drop_overdue()
        except Exception:
            logger.exception("the listener at %s stops because of a fault in kvplug", self._contact)
        finally:
            self._bound.close()
            with self._lock:
                self._closed = True
                self._close_descriptors()
                self._changed.notify_all()

    def _close_descriptors(self) -> None:
        with no_fork:
            self._selector.close()
            for sock in (self._sock, self._wake_in, self._wake_out):
                sock.close()
            for stranger in self._unproven:
                stranger.sock.close()
        for connection in list(self._proven):
            connection.close()
        self._proven.clear()

    def _take(self) -> None:
        try:
            with no_fork:
                sock, _ = self._sock.accept()
                close_after_fork(sock)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            self._shortage = NamedExhaustion.of(e, f"accepting a connection at {self._contact}")
            logger.warning("%s", self._shortage or f"accept failed at {self._contact}: {e}")
            if self._shortage is not None:
                if self._unproven:
                    self._refuse(self._unproven[0], RefusedError.for_lack(self._shortage))
                time.sleep(_PAUSE_S)  # connections in the backlog keep the socket readable
            return
        self._shortage = None
        now = time.monotonic()
        try:
            sock.setblocking(False)
            origin = origin_of(sock)
            if sock.family != socket.AF_UNIX:
                tune(sock)
        except OSError:
            with no_fork:
                sock.close()
            return  # the client has already gone
        tls = None if self._tls is None else self._tls.context
        stranger = Stranger(sock, origin, self._challenge, now + _PROOF_TIMEOUT_S, tls)
        try:
            if self._mode is Mode.SAME_USER:
                check_same_user(sock)  # another user does not even get a place among the unproven
            if origin not in (THIS_USER, THIS_HOST) and not self._failures.may_come(origin, now):
                raise RefusedError(Refusal.BUSY, text=f"too many connections from {origin} failed")
        except RefusedError as refused:
            self._refuse(stranger, refused)
            return
        while (crowding := to_drop(self._unproven, origin, _MAX_UNPROVEN)) is not None:
            self._refuse(crowding, RefusedError(Refusal.BUSY))
        self._unproven.append(stranger)
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _challenge(self, binding: bytes) -> Exchange:
        """Start this end of the challenge. ``binding`` identifies the TLS session."""
        identity = encode_identity(PeerIdentity.of_this_process(self._label))
        return admit(self._purpose, self._mode, self._credentials.key, identity, binding)

    def _proceed(self, stranger: Stranger) -> None:
        try:
            peer = stranger.proceed()
        except RefusedError as refused:
            self._refuse(stranger, refused)
        except Exception:
            logger.exception("a challenge at %s failed because of a fault in kvplug", self._contact)
            self._refuse(stranger, RefusedError(Refusal.SILENT))
        else:
            if peer is not None and len(self._proven) >= _MAX_WAITING:
                self._refuse(stranger, RefusedError(Refusal.BUSY))
            elif peer is not None:
                self._proved(stranger, peer)

    def _proved(self, stranger: Stranger, peer: PeerIdentity) -> None:
        sock = stranger.sock
        self._selector.unregister(sock)
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock = plain_end(sock, str(peer))
            sock.setblocking(True)
            connection = Connection(sock, peer, self._purpose, self._mode, self._contact)
        except (OSError, TransportError) as e:
            logger.warning("a connection to %s was dropped: %s", self._contact, e)
            self._shortage = NamedExhaustion.of(e, f"taking a TLS connection at {self._contact}")
            return
        finally:
            self._unproven.remove(stranger)
        with self._lock:
            self._proven.append(connection)
            self._changed.notify_all()

    def _refuse(self, stranger: Stranger, refused: RefusedError) -> None:
        reason = refused.refusal.reason
        self._refusals[reason] += 1
        self._last_refusal = refused
        if refused.refusal is Refusal.BUSY and self._shortage is None:
            self._shortage = NamedExhaustion.of(refused)
        level = logging.WARNING if self._refusals[reason] == 1 else logging.DEBUG
        logger.log(level, "a connection to %s was refused: %s", self._contact, refused)
        if stranger in self._unproven:
            self._unproven.remove(stranger)
            self._failures.failed(stranger.origin, time.monotonic())
            self._selector.unregister(stranger.sock)
        stranger.refuse(refused)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        while self._unproven and self._unproven[0].deadline <= now:
            self._refuse(self._unproven[0], RefusedError(Refusal.SILENT))

    def _turned_away(self) -> str:
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(self._refusals.items()))
        return f"; turned away: {counts}" if counts else ""
