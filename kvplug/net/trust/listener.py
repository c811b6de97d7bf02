"""A listener accepts connections, has each one prove itself, and hands out the proven ones.

One thread per listener serves all unproven connections concurrently. Each has its own deadline and bounded
memory (a few hundred bytes; with TLS what its handshake needs), and there are at most ``max_unproven`` of
them, of which one origin does not take all: see :mod:`kvplug.net.trust.admission`. A connection that is
silent, slow or sends garbage delays no other.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from typing import Any, Self

from kvplug.config.addresses import Address, ListenerContact, TcpAddress, UnixAddress
from kvplug.errors import ClosedError, KvplugError, ResourceExhaustedError, TimeoutError, TransportError
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion, exhaustion_of
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.addresses import is_loopback
from kvplug.net.trust.admission import Admission
from kvplug.net.trust.binding import bound, cannot_bind
from kvplug.net.trust.challenge import Mode, Refusal, RefusedError
from kvplug.net.trust.connection import Connection, dial, dial_until, tune
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import encode_identity, this_process
from kvplug.net.trust.peercred import (
    HAS_PROC_NET,
    NoSocketDiagError,
    tcp_peer_uid_at_once,
    tcp_peer_uids,
    unix_peer_uid,
)
from kvplug.net.trust.relay import plain_end
from kvplug.net.trust.socket_path import SocketFile
from kvplug.net.trust.stranger import AskTablesError, Stranger
from kvplug.net.trust.tls import ListenerTls

__all__ = ["Connection", "Listener", "dial", "dial_until"]

logger = logging.getLogger(__name__)

PROOF_TIMEOUT_S = 5.0
"""How long a connection may take to prove itself."""
MAX_UNPROVEN = 64
_MAX_WAITING = 1024  # proven, and not yet taken by accept()
_PAUSE_S = 0.1  # when the process is out of descriptors
_AF_UNIX = getattr(socket, "AF_UNIX", None)


THIS_USER = "this user"
"""The origin of connections that are this user's own: they may fail as often as they like."""
UNKNOWN = "this host"
"""The origin of connections of this host whose user the kernel does not show at once."""


class Listener:
    """Listens at one address for one purpose. Any thread may call any method.

    Made by :meth:`open`. Its thread ends with :meth:`close`; in a forked child it is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        contact: ListenerContact,
        credentials: Credentials,
        purpose: str,
        label: str,
        proof_timeout_s: float,
        max_unproven: int,
    ) -> None:
        self._sock = sock
        self._contact = contact
        self._file = _file_of(contact)
        self._purpose = purpose
        self._label = label
        self._proof_timeout_s = proof_timeout_s
        self._keys = _accepted(contact, credentials)
        tcp = isinstance(contact.address, TcpAddress)
        self._tls = ListenerTls(credentials.tls) if tcp and credentials.tls is not None else None
        self._admission = Admission[Stranger](max_unproven)
        self._asking_lock = threading.Lock()
        self._asking: list[Stranger] = []
        """Strangers whose users are looked up in the kernel's tables, by another thread."""
        self._answered: collections.deque[Stranger] = collections.deque()
        self._asker: BackgroundThread | None = None
        self._proven: collections.deque[Connection] = collections.deque()
        # Code takes the lock, not the condition: Ctrl-C inside of the condition's ``__enter__`` leaves it
        # taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._refusals: collections.Counter[str] = collections.Counter()
        self._last_refusal: RefusedError | None = None
        self._paused_until = 0.0
        self._shortage: ResourceExhaustedError | None = None
        """Why the latest connection could not be taken; ``None``: it could."""
        with contextlib.ExitStack() as undo:
            self._wake_in, self._wake_out = socket.socketpair()
            undo.callback(self._wake_in.close)
            undo.callback(self._wake_out.close)
            self._selector = selectors.DefaultSelector()
            undo.callback(self._selector.close)
            for s in (sock, self._wake_out):
                s.setblocking(False)
                self._selector.register(s, selectors.EVENT_READ)
            close_after_fork(self)
            self._thread = BackgroundThread(self._run, name=f"kvplug listener {contact}", stop=self._stop)
            self._thread.start()
            undo.pop_all()

    @classmethod
    def open(
        cls,
        address: str | Address,
        credentials: Credentials,
        purpose: str,
        *,
        label: str = "",
        backlog: int = 128,
        proof_timeout_s: float = PROOF_TIMEOUT_S,
        max_unproven: int = MAX_UNPROVEN,
    ) -> Listener:
        """Start to listen at ``host:port`` (port 0: any free one), ``unix:@name``, ``unix:`` (any name) or
        ``unix:/path``. The file of a path is removed with the listener; one that a dead process left is taken
        over.

        Without a secret only this user's processes on this host can connect. The dialling end must name the
        same ``purpose``; ``label`` names this process to it. Where there are no abstract Unix sockets,
        ``unix:`` becomes loopback TCP with a token. With TLS in ``credentials``, TCP connections use it.

        Raises:
            InsecureAddressError: other hosts can reach it and there is no secret; nothing is bound.
            AddressInUseError: another process listens there; names the address, and the process if known.
            TransportError: it cannot be bound for another reason.
            ResourceExhaustedError: the process has no free descriptor, or can start no more threads.
            ConfigError: it is not an address, or not one of this platform's or host's; or a TLS file cannot
                be used.
        """
        with NamedExhaustion(f"listening at {address}"):
            sock, contact = bound(address, credentials)
            try:
                sock.listen(backlog)
                return cls(sock, contact, credentials, purpose, label, proof_timeout_s, max_unproven)
            except KvplugError:
                _unbind(sock, contact)
                raise
            except OSError as e:
                _unbind(sock, contact)
                raise cannot_bind(contact.address, e) from e
            except BaseException:
                _unbind(sock, contact)
                raise

    def __repr__(self) -> str:
        return f"<Listener at {self._contact} for {self._purpose!r}{', closed' if self._closed else ''}>"

    @property
    def address(self) -> str:
        """The address it listens at, with the port: for messages and logs."""
        return str(self._contact)

    @property
    def contact(self) -> str:
        """What to hand to ``dial``. On loopback TCP it carries a token: do not log it."""
        return self._contact.reveal()

    @property
    def refusals(self) -> dict[str, int]:
        """How many connections were refused, by reason ("wrong secret", "garbage", "silent", …)."""
        return dict(self._refusals)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called here, or this is a forked child."""
        return self._closed

    def accept(self, timeout: Timeout = None) -> Connection:
        """The next proven connection.

        Raises:
            TimeoutError: no connection proved itself in time; counts the refused ones and chains the last.
            ResourceExhaustedError: nor could the latest one be taken, for lack of a resource. It may still
                be waiting.
            ClosedError: the listener is closed, also when that happens during the wait.
        """
        deadline = Deadline.after(timeout, None)
        with self._lock:
            while not self._proven:
                if self._closed:
                    raise ClosedError(f"the listener at {self._contact} is closed")
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
        """Return, unless the latest connection could not be taken for lack of a resource. For others that
        have waited for a connection in vain.

        Raises:
            ResourceExhaustedError: it could not.
        """
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            raise shortage

    def close(self) -> None:
        """Stop listening, and drop connections that are unproven or not accepted yet. Idempotent.

        When it returns the thread has ended and the descriptors are closed; accepted connections live on.
        """
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        """Have the thread end, and wake every thread that accepts."""
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
                for key, _ in self._selector.select(self._pause()):
                    if key.fileobj is self._sock:
                        try:
                            self._let_in()
                        except Exception:  # out of memory, say: the listener outlives it
                            logger.exception("taking in a connection at %s failed", self._contact)
                    elif key.data is not None and key.data in self._admission:
                        self._hear(key.data)
                    elif key.fileobj is self._wake_out:
                        self._wake_out.recv(64)
                while self._answered:
                    self._go_on(self._answered.popleft())
                self._drop_overdue()
        except Exception:
            logger.exception("the listener at %s stops: a fault of kvplug", self._contact)
        finally:
            if self._file is not None:
                self._file.remove()
            with self._lock:
                self._closed = True
                with contextlib.suppress(OSError):
                    # A child that was forked a moment ago may still hold the socket open: nothing may connect
                    # to it.
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._close_descriptors()
                self._changed.notify_all()

    def _close_descriptors(self) -> None:
        self._selector.close()
        for sock in (self._sock, self._wake_in, self._wake_out):
            sock.close()
        for stranger in self._admission.all():
            stranger.sock.close()
        for connection in list(self._proven):
            connection.close()
        self._proven.clear()

    def _pause(self) -> float | None:
        """How long to sleep if nothing happens."""
        moments = []
        oldest = self._admission.oldest
        if oldest is not None:
            moments.append(oldest.deadline)
        if self._paused_until:
            moments.append(self._paused_until)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _let_in(self) -> None:
        try:
            sock, peer = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            self._shortage = exhaustion_of(e, f"accepting a connection at {self._contact}")
            if self._shortage is not None:
                # Connections in the backlog keep the socket readable: do not poll it for a moment.
                logger.warning("%s", self._shortage)
                self._selector.unregister(self._sock)
                self._paused_until = time.monotonic() + _PAUSE_S
                if self._admission.oldest is not None:
                    self._refuse(self._admission.oldest, RefusedError.for_lack(self._shortage))
                return
            logger.warning("accept failed at %s: %s", self._contact, e)
            return
        self._shortage = None
        now = time.monotonic()
        try:
            sock.setblocking(False)
            uid, ask_uid = self._user_of(sock)
        except OSError as e:
            sock.close()
            self._shortage = exhaustion_of(e)
            if self._shortage is not None:
                logger.warning("a connection to %s was dropped: %s", self._contact, self._shortage)
            return  # else it is gone again
        origin = _origin(sock, peer, uid)
        stranger = Stranger(
            sock,
            purpose=self._purpose,
            keys=self._keys,
            identity=lambda: encode_identity(this_process(self._label)),
            deadline=now + self._proof_timeout_s,
            uid=uid,
            ask_uid=ask_uid,
            tls=None if self._tls is None else self._tls.context,
        )
        if origin not in (THIS_USER, UNKNOWN) and not self._admission.may_come(origin, now):
            self._refuse(stranger, RefusedError(Refusal.CROWDED, f"too many connections of {origin} failed"))
            return
        if Mode.SECRET not in self._keys and sock.family == _AF_UNIX:
            try:
                stranger.attest()  # another user does not even get a place
            except RefusedError as refused:
                self._refuse(stranger, refused)
                return
        while (crowding := self._admission.to_drop(origin)) is not None:
            self._refuse(crowding, RefusedError(Refusal.CROWDED))
        self._admission.add(stranger, origin)
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _user_of(self, sock: socket.socket) -> tuple[int | None, bool]:
        """The uid of a new connection, as far as the kernel shows it at once, and whether to ask later."""
        if sock.family == _AF_UNIX:
            return unix_peer_uid(sock), False
        tune(sock)
        if not isinstance(self._contact.address, TcpAddress) or not is_loopback(sock.getpeername()[0]):
            return None, False
        try:
            return tcp_peer_uid_at_once(sock), False
        except NoSocketDiagError:
            return None, True

    def _hear(self, stranger: Stranger) -> None:
        try:
            proven = stranger.hear()
        except RefusedError as refused:
            self._refuse(stranger, refused)
            return
        except AskTablesError:
            self._ask_tables(stranger)
            return
        except Exception:
            logger.exception("a challenge at %s failed: a fault of kvplug", self._contact)
            self._refuse(stranger, RefusedError(Refusal.LEFT))
            return
        if proven:
            self._proved(stranger)

    def _ask_tables(self, stranger: Stranger) -> None:
        """Have the user of a connection looked up, while others are served."""
        self._selector.unregister(stranger.sock)
        with self._asking_lock:
            self._asking.append(stranger)
            if self._asker is not None:
                return
            asker = BackgroundThread(self._read_tables, name=f"kvplug uids {self._contact}", stop=self._stop)
            try:
                asker.start()
                self._asker = asker
                return
            except RuntimeError as e:
                self._asking.clear()
                shortage = exhaustion_of(e, "looking up its user")
        refused = RefusedError(Refusal.CROWDED) if shortage is None else RefusedError.for_lack(shortage)
        self._refuse(stranger, refused)

    def _read_tables(self) -> None:
        """In a thread of its own: answer all questions with one look at the tables."""
        while True:
            with self._asking_lock:
                asking, self._asking = self._asking, []
                if not asking or self._closed:
                    self._asker = None
                    return
            shortage: ResourceExhaustedError | None = None
            try:
                uids = tcp_peer_uids([each.sock for each in asking])
            except OSError as e:
                logger.warning("the users of connections to %s cannot be looked up: %s", self._contact, e)
                shortage = exhaustion_of(e, "looking up the users of connections")
                uids = [None] * len(asking)
            for stranger, uid in zip(asking, uids, strict=True):
                stranger.uid, stranger.ask_uid, stranger.shortage = uid, False, shortage
                self._answered.append(stranger)
            with contextlib.suppress(OSError):  # full: it is awake anyway; closed: it has ended
                self._wake_in.send(b"x")

    def _go_on(self, stranger: Stranger) -> None:
        if stranger in self._admission:  # not dropped meanwhile
            self._selector.register(stranger.sock, selectors.EVENT_READ, stranger)
            self._hear(stranger)

    def _proved(self, stranger: Stranger) -> None:
        peer, mode = stranger.challenge.peer, stranger.challenge.mode
        assert peer is not None and mode is not None
        if len(self._proven) >= _MAX_WAITING:
            self._refuse(stranger, RefusedError(Refusal.CROWDED))
            return
        self._selector.unregister(stranger.sock)
        self._admission.remove(stranger)
        sock = stranger.sock
        if isinstance(sock, ssl.SSLSocket):
            try:
                sock = plain_end(sock, str(peer))
            except (OSError, TransportError) as e:
                logger.warning("a connection to %s was dropped: %s", self._contact, e)
                self._shortage = exhaustion_of(e, f"taking a TLS connection at {self._contact}")
                return
        sock.setblocking(True)
        with self._lock:
            self._proven.append(Connection(sock, peer, self._purpose, mode, str(self._contact)))
            self._changed.notify_all()

    def _refuse(self, stranger: Stranger, refused: RefusedError) -> None:
        reason = refused.refusal.reason
        self._refusals[reason] += 1
        self._last_refusal = refused
        if refused.refusal is Refusal.EXHAUSTED and self._shortage is None:
            self._shortage = exhaustion_of(refused)
        level = logging.WARNING if self._refusals[reason] == 1 else logging.DEBUG
        logger.log(level, "a connection to %s was refused: %s", self._contact, refused)
        if stranger in self._admission:
            self._admission.failed(self._admission.remove(stranger), time.monotonic())
            with contextlib.suppress(KeyError, ValueError):  # its user is being looked up
                self._selector.unregister(stranger.sock)
        stranger.refuse(refused)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        while (oldest := self._admission.oldest) is not None and oldest.deadline <= now:
            self._refuse(oldest, RefusedError(Refusal.SILENT))
        if self._paused_until and self._paused_until <= now:
            self._paused_until = 0.0
            self._selector.register(self._sock, selectors.EVENT_READ)

    def _turned_away(self) -> str:
        if not self._refusals:
            return ""
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(self._refusals.items()))
        return f"; turned away: {counts}"


def _file_of(contact: ListenerContact) -> SocketFile | None:
    """The file of a bound socket; ``None`` if it has none."""
    address = contact.address
    return SocketFile.at(address.name) if isinstance(address, UnixAddress) and address.is_path else None


def _unbind(sock: socket.socket, contact: ListenerContact) -> None:
    with contextlib.suppress(OSError):
        if (file := _file_of(contact)) is not None:
            file.remove()
    sock.close()


def _accepted(contact: ListenerContact, credentials: Credentials) -> dict[Mode, bytes]:
    """The modes a listener accepts, and the key of each: with a secret, nothing else."""
    if credentials.secret is not None:
        return {Mode.SECRET: credentials.secret.reveal()}
    if isinstance(contact.address, UnixAddress):
        return {Mode.SAME_USER: b""}
    return {Mode.TOKEN: contact.token.encode()} | ({Mode.SAME_USER: b""} if HAS_PROC_NET else {})


def _origin(sock: socket.socket, peer: Any, uid: int | None) -> str:
    """Where a connection comes from, as far as the kernel shows it: a user of this host, or another host."""
    if uid is not None:
        return THIS_USER if uid == os.geteuid() else f"user {uid} of this host"
    if sock.family == _AF_UNIX or is_loopback(peer[0]):
        return UNKNOWN
    host = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is None:
        return str(ipaddress.ip_network((host, 64), strict=False))  # one host may have all of these
    return str(host)
