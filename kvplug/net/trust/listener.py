"""A listener accepts connections, has each one prove itself, and hands out the proven ones.

One thread per listener serves all unproven connections concurrently. Each has its own deadline and a few
hundred bytes of memory, and there are at most ``max_unproven`` of them (the oldest is dropped for a new one).
A connection that is silent, slow or sends garbage delays no other.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import logging
import selectors
import socket
import threading
import time
from typing import Self

import attrs

from kvplug.errors import ClosedError, TimeoutError
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.fork import close_after_fork
from kvplug.net.trust.addresses import Address, ListenerContact, UnixAddress
from kvplug.net.trust.binding import bound, cannot_bind
from kvplug.net.trust.challenge import Mode, Refusal, RefusedError, ServerChallenge
from kvplug.net.trust.connection import Connection, dial, dial_until, tune
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import encode_identity, this_process
from kvplug.net.trust.peercred import HAS_PROC_NET, same_user, tcp_peer_uid, unix_peer_uid

__all__ = ["Connection", "Listener", "dial", "dial_until"]

logger = logging.getLogger(__name__)

PROOF_TIMEOUT_S = 5.0
"""How long a connection may take to prove itself."""
MAX_UNPROVEN = 64
_MAX_WAITING = 1024  # proven, and not yet taken by accept()
_PAUSE_S = 0.1  # when the process is out of descriptors


@attrs.define(eq=False)
class _Stranger:
    """A connection that has not proved itself yet."""

    sock: socket.socket
    challenge: ServerChallenge
    deadline: float
    received: bytearray = attrs.field(factory=bytearray)


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
        self._purpose = purpose
        self._label = label
        self._proof_timeout_s = proof_timeout_s
        self._max_unproven = max_unproven
        self._keys = _accepted(contact, credentials)
        self._strangers: dict[_Stranger, None] = {}  # oldest first
        self._proven: collections.deque[Connection] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._refusals: collections.Counter[str] = collections.Counter()
        self._last_refusal: RefusedError | None = None
        self._paused_until = 0.0
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for s in (sock, self._wake_out):
            s.setblocking(False)
            self._selector.register(s, selectors.EVENT_READ)
        close_after_fork(self)
        self._thread = threading.Thread(target=self._run, name=f"kvplug listener {contact}", daemon=True)
        self._thread.start()

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
        """Start to listen at ``host:port`` (port 0: any free one), ``unix:@name`` or ``unix:`` (any name).

        Without a secret only this user's processes on this host can connect. The dialling end must name the
        same ``purpose``; ``label`` names this process to it. Where there are no abstract Unix sockets,
        ``unix:`` becomes loopback TCP with a token.

        Raises:
            InsecureAddressError: other hosts can reach it and there is no secret; nothing is bound.
            AddressInUseError: another process listens there; names the address, and the process if known.
            TransportError: it cannot be bound for another reason.
            ConfigError: it is not an address, or not one of this platform's or host's.
        """
        sock, contact = bound(address, credentials)
        try:
            sock.listen(backlog)
            return cls(sock, contact, credentials, purpose, label, proof_timeout_s, max_unproven)
        except OSError as e:
            sock.close()
            raise cannot_bind(contact.address, e) from e
        except BaseException:
            sock.close()
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
        return self._closed

    def accept(self, timeout: Timeout = None) -> Connection:
        """The next proven connection.

        Raises:
            TimeoutError: no connection proved itself in time; counts the refused ones and chains the last.
            ClosedError: the listener is closed, also when that happens during the wait.
        """
        deadline = Deadline.after(timeout, None)
        with self._changed:
            while not self._proven:
                if self._closed:
                    raise ClosedError(f"the listener at {self._contact} is closed")
                if deadline.expired:
                    raise TimeoutError(
                        f"no process connected to {self._contact} for {self._purpose!r} in"
                        f" time{self._turned_away()}"
                    ) from self._last_refusal
                self._changed.wait(deadline.remaining())
            if self._closed:
                raise ClosedError(f"the listener at {self._contact} is closed")
            return self._proven.popleft()

    def close(self) -> None:
        """Stop listening, and drop connections that are unproven or not accepted yet. Idempotent.

        When it returns the thread has ended and the descriptors are closed; accepted connections live on.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork_in_child(self) -> None:
        self._closed = True
        self._changed = threading.Condition()
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
                    elif key.data is not None and key.data in self._strangers:
                        self._hear(key.data)
                self._drop_overdue()
        except Exception:
            logger.exception("the listener at %s stops: a fault of kvplug", self._contact)
        finally:
            with self._changed:
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
        for stranger in list(self._strangers):
            stranger.sock.close()
        for connection in list(self._proven):
            connection.close()
        self._strangers.clear()
        self._proven.clear()

    def _pause(self) -> float | None:
        """How long to sleep if nothing happens."""
        moments = []
        if self._strangers:
            moments.append(next(iter(self._strangers)).deadline)
        if self._paused_until:
            moments.append(self._paused_until)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _let_in(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # Connections in the backlog keep the socket readable: do not poll it for a moment.
                logger.warning("cannot accept at %s: %s", self._contact, e.strerror)
                self._selector.unregister(self._sock)
                self._paused_until = time.monotonic() + _PAUSE_S
                if self._strangers:
                    self._refuse(next(iter(self._strangers)), RefusedError(Refusal.CROWDED))
                return
            logger.warning("accept failed at %s: %s", self._contact, e)
            return
        try:
            sock.setblocking(False)
            if sock.family != getattr(socket, "AF_UNIX", None):
                tune(sock)
        except OSError:  # gone again
            sock.close()
            return
        attest = functools.partial(_attest_dialler, sock)
        identity = encode_identity(this_process(self._label))
        challenge = ServerChallenge(self._purpose, self._keys, identity, attest)
        stranger = _Stranger(sock, challenge, time.monotonic() + self._proof_timeout_s)
        if Mode.SECRET not in self._keys and sock.family == getattr(socket, "AF_UNIX", None):
            try:
                attest()  # another user does not even get a place
            except RefusedError as refused:
                self._refuse(stranger, refused)
                return
        while len(self._strangers) >= self._max_unproven:
            self._refuse(next(iter(self._strangers)), RefusedError(Refusal.CROWDED))
        self._strangers[stranger] = None
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _hear(self, stranger: _Stranger) -> None:
        challenge = stranger.challenge
        try:
            data = stranger.sock.recv(challenge.need - len(stranger.received))
            if not data:
                raise RefusedError(Refusal.LEFT)
            stranger.received += data
            if len(stranger.received) < challenge.need:
                return
            reply = challenge.feed(bytes(stranger.received))
            stranger.received.clear()
            # A few hundred bytes into an empty buffer: a client for which that would block is dropped.
            if reply and stranger.sock.send(reply) != len(reply):
                raise RefusedError(Refusal.LEFT)
        except RefusedError as refused:
            self._refuse(stranger, refused)
            return
        except BlockingIOError:
            return
        except OSError:
            self._refuse(stranger, RefusedError(Refusal.LEFT))
            return
        except Exception:
            logger.exception("a challenge at %s failed: a fault of kvplug", self._contact)
            self._refuse(stranger, RefusedError(Refusal.LEFT))
            return
        if challenge.peer is not None:
            self._proved(stranger)

    def _proved(self, stranger: _Stranger) -> None:
        peer, mode = stranger.challenge.peer, stranger.challenge.mode
        assert peer is not None and mode is not None
        if len(self._proven) >= _MAX_WAITING:
            self._refuse(stranger, RefusedError(Refusal.CROWDED))
            return
        self._strangers.pop(stranger, None)
        self._selector.unregister(stranger.sock)
        stranger.sock.setblocking(True)
        with self._changed:
            self._proven.append(Connection(stranger.sock, peer, self._purpose, mode, str(self._contact)))
            self._changed.notify()

    def _refuse(self, stranger: _Stranger, refused: RefusedError) -> None:
        reason = refused.refusal.reason
        self._refusals[reason] += 1
        self._last_refusal = refused
        level = logging.WARNING if self._refusals[reason] == 1 else logging.DEBUG
        logger.log(level, "a connection to %s was refused: %s", self._contact, refused)
        if stranger in self._strangers:
            del self._strangers[stranger]
            self._selector.unregister(stranger.sock)
        with contextlib.suppress(OSError):
            if refused.refusal < Refusal.SILENT:
                stranger.sock.send(refused.reply)
                stranger.sock.shutdown(socket.SHUT_WR)
        stranger.sock.close()

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        while self._strangers:
            oldest = next(iter(self._strangers))
            if oldest.deadline > now:
                break
            self._refuse(oldest, RefusedError(Refusal.SILENT))
        if self._paused_until and self._paused_until <= now:
            self._paused_until = 0.0
            self._selector.register(self._sock, selectors.EVENT_READ)

    def _turned_away(self) -> str:
        if not self._refusals:
            return ""
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(self._refusals.items()))
        return f"; turned away: {counts}"


def _accepted(contact: ListenerContact, credentials: Credentials) -> dict[Mode, bytes]:
    """The modes a listener accepts, and the key of each: with a secret, nothing else."""
    if credentials.secret is not None:
        return {Mode.SECRET: credentials.secret.reveal()}
    if isinstance(contact.address, UnixAddress):
        return {Mode.SAME_USER: b""}
    return {Mode.TOKEN: contact.token.encode()} | ({Mode.SAME_USER: b""} if HAS_PROC_NET else {})


def _attest_dialler(sock: socket.socket) -> None:
    unix = sock.family == getattr(socket, "AF_UNIX", None)
    try:
        uid = unix_peer_uid(sock) if unix else tcp_peer_uid(sock)
    except OSError as e:
        raise RefusedError(Refusal.LEFT) from e
    if uid is None:
        raise RefusedError(Refusal.UNKNOWN_USER, "the kernel does not say which user it belongs to")
    if not same_user(uid):
        raise RefusedError(Refusal.OTHER_USER, f"it belongs to another user of this host (uid {uid})")
