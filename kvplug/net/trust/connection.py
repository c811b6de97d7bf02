"""A connection whose two ends have authenticated each other, and how to make one."""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Self

import attrs

from kvplug.config.addresses import ListenerContact, TcpAddress, UnixAddress, parse_contact
from kvplug.errors import (
    AuthenticationError,
    ClosedError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    WireError,
)
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.trust.addresses import HAS_ABSTRACT_SOCKETS, Resolved, resolve
from kvplug.net.trust.challenge import ClientChallenge, Mode, Refusal, advice
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import PeerIdentity, encode_identity, this_process
from kvplug.net.trust.peercred import same_user, tcp_peer_uid, unix_peer_uid
from kvplug.net.trust.relay import plain_end
from kvplug.net.trust.tls import binding_of, refusal_of, wrap_dialled

DIAL_TIMEOUT_S = 10.0
"""The default timeout of ``dial``."""
_RETRY_FIRST_S, _RETRY_MAX_S = 0.01, 0.25
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))


@attrs.define(eq=False)
class Connection:
    """A proven connection. Its receiver owns it and closes it."""

    sock: socket.socket = attrs.field(repr=False)
    """Blocking and without a timeout when handed over; nothing beyond the proof was read from it."""
    peer: PeerIdentity
    """The process at the other end."""
    purpose: str
    """The purpose that both ends have proved."""
    mode: Mode
    """How the two ends proved themselves."""
    address: str
    """Where the listener listens; never a token."""
    since: float = attrs.field(factory=time.monotonic, init=False, repr=False)
    """When both ends had proved themselves, by ``time.monotonic``."""

    def __str__(self) -> str:
        return self.describe

    @property
    def describe(self) -> str:
        """The peer and the address, for messages."""
        return f"{self.peer} ({self.purpose} at {self.address})"

    @property
    def is_same_user(self) -> bool:
        """Whether the kernel says that the other end runs as the user of this process: over Unix sockets
        only."""
        if self.sock.family != getattr(socket, "AF_UNIX", None):
            return False
        try:
            uid = unix_peer_uid(self.sock)
        except OSError:
            return False
        return uid is not None and same_user(uid)

    def fileno(self) -> int:
        """The socket's descriptor; -1 once closed."""
        return self.sock.fileno()

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dial(
    contact: str,
    credentials: Credentials,
    purpose: str,
    timeout: Timeout = DEFAULT_TIMEOUT,
    *,
    label: str = "",
) -> Connection:
    """Connect to the listener at ``contact``; both ends prove themselves.

    ``purpose`` must be the listener's word for what it serves. ``label`` names this process to the listener.

    Raises:
        InsecureAddressError: other hosts can reach that address and there is no secret; nothing is dialled.
        PeerGoneError: no process listens there, or it hung up. Not retried (see :func:`dial_until`).
        AuthenticationError: one end did not prove itself; the message says what to check.
        TimeoutError: no answer in time (10 s by default).
        ConfigError: a TLS file cannot be used.
        WireError: ``contact`` is not one.
        ResourceExhaustedError: the process has no free descriptor, or can start no more threads; or the
            listener's says so.
    """
    target = parse_contact(contact)
    with NamedExhaustion(f"connecting to {target}"):
        return _dial(target, credentials, purpose, Deadline.after(timeout, DIAL_TIMEOUT_S), label)


def _dial(
    target: ListenerContact, credentials: Credentials, purpose: str, deadline: Deadline, label: str
) -> Connection:
    resolved: tuple[Resolved, ...] = ()
    if isinstance(target.address, UnixAddress):
        if not target.address.is_path and not HAS_ABSTRACT_SOCKETS:
            raise WireError(f"{target} is an abstract Unix socket, which this platform does not have")
    else:
        resolved = resolve(target.address)
        credentials.require_secret(target.address, resolved)
    sock = _connect(target, resolved, deadline)
    try:
        with _in_words(str(target), deadline):
            if credentials.tls is not None and isinstance(target.address, TcpAddress):
                sock.settimeout(_seconds(deadline))
                sock = wrap_dialled(sock, credentials.tls, target.address.host, str(target))
            peer, mode = _prove(sock, target, credentials, purpose, deadline, label)
            sock.settimeout(None)
            if isinstance(sock, ssl.SSLSocket):
                sock = plain_end(sock, str(target))
    except BaseException:
        sock.close()
        raise
    return Connection(sock, peer, purpose, mode, str(target))


def dial_until(
    contact: str,
    credentials: Credentials,
    purpose: str,
    deadline: Deadline,
    *,
    label: str = "",
    stop: threading.Event | None = None,
) -> Connection:
    """:func:`dial`, repeated until a process listens there, at most until ``deadline``.

    Raises:
        TimeoutError: no listener started there in time; names the address and how long was tried.
        ResourceExhaustedError: the listener's last answer was that its process lacks a resource. Or this
            process does, at once.
        ClosedError: ``stop`` was set; also in the pause between two tries.
        The rest as :func:`dial`, at once.
    """
    began = time.monotonic()
    pause = _RETRY_FIRST_S
    stop = stop or threading.Event()
    # The listener's last answer, if it was one. A try without an answer keeps it: the last try may be short.
    shortage: ResourceExhaustedError | None = None
    while True:
        if stop.is_set():
            raise ClosedError(f"{parse_contact(contact)} is not waited for any more: this end was closed")
        remaining = deadline.remaining()
        try:
            return dial(
                contact,
                credentials,
                purpose,
                DIAL_TIMEOUT_S if remaining is None else max(0.05, min(remaining, DIAL_TIMEOUT_S)),
                label=label,
            )
        except (PeerGoneError, TimeoutError, ResourceExhaustedError) as e:
            if isinstance(e, ResourceExhaustedError):
                if e.__cause__ is not None:
                    raise  # of this process; the listener's may have what it lacks in a moment
                shortage = e
            elif isinstance(e, PeerGoneError):
                shortage = None
            remaining = deadline.remaining()
            if remaining is not None and remaining <= 0:
                waited = time.monotonic() - began
                where = f"at {parse_contact(contact)} in {waited:.1f} s (last: {shortage or e})"
                if shortage is not None:
                    text = f"no connection was made {where}"
                    raise ResourceExhaustedError(text, resource=shortage.resource) from e
                raise TimeoutError(f"no listener answered {where}") from e
        stop.wait(pause if remaining is None else min(pause, remaining))
        pause = min(pause * 2, _RETRY_MAX_S)


def tune(sock: socket.socket) -> None:
    """Set the options of every TCP connection of kvplug: no delay, and probes that notice a vanished host.

    The peer's kernel answers the probes, also for a process that is stopped.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def _in_words(where: str, deadline: Deadline) -> Iterator[None]:
    """Map foreign exceptions of a dial to kvplug's."""
    try:
        yield
    except KvplugError:
        raise
    except ssl.SSLError as e:  # in the middle of the proof: only now a listener refuses our certificate
        raise refusal_of(e, where) from e
    except (OSError, EOFError) as e:
        if isinstance(e, builtins.TimeoutError):
            raise TimeoutError(f"{where} did not answer in time") from e
        if isinstance(e, ConnectionRefusedError):
            raise PeerGoneError(f"no process listens at {where}") from e
        if isinstance(e, EOFError | ConnectionError):
            raise PeerGoneError(
                f"{where} hung up before the proof was complete: it is shutting down, overloaded,"
                " or no kvplug listener"
            ) from e
        raise PeerGoneError(f"{where} cannot be reached: {e.strerror or e}") from e


def _connect(target: ListenerContact, resolved: tuple[Resolved, ...], deadline: Deadline) -> socket.socket:
    if isinstance(target.address, UnixAddress):
        with _in_words(str(target), deadline):
            return _connect_unix(target.address, deadline)
    error: PeerGoneError | TimeoutError | None = None
    for end in resolved:
        try:
            with _in_words(str(target), deadline):
                sock = socket.socket(end.family, socket.SOCK_STREAM)
        except PeerGoneError as e:
            error = e
            continue
        try:
            with _in_words(str(target), deadline):
                sock.settimeout(_seconds(deadline))
                sock.connect(end.sockaddr)
                if sock.getsockname() == sock.getpeername():
                    # A port in the ephemeral range without a listener: the kernel chose it for our
                    # own end too, and connected the socket to itself.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
                tune(sock)
                return sock
        except (PeerGoneError, TimeoutError) as e:
            sock.close()
            error = e
        except BaseException:
            sock.close()
            raise
    raise error or PeerGoneError(f"{target} has no address that can be dialled")


def _connect_unix(address: UnixAddress, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            sock.settimeout(_seconds(deadline))
            try:
                sock.connect(address.sockaddr)
                return sock
            except BlockingIOError:
                # The backlog is full: a Unix socket says so at once instead of waiting.
                if deadline.expired:
                    raise builtins.TimeoutError from None
                time.sleep(0.005)
    except BaseException:
        sock.close()
        raise


def _prove(
    sock: socket.socket,
    target: ListenerContact,
    credentials: Credentials,
    purpose: str,
    deadline: Deadline,
    label: str,
) -> tuple[PeerIdentity, Mode]:
    mode, key = _client_mode(target, credentials)
    attest = functools.partial(_attest_listener, sock, target)
    if mode is Mode.SAME_USER and isinstance(target.address, UnixAddress):
        attest()  # before a single byte is sent to what may be another user's socket
    identity = encode_identity(this_process(label))
    binding = binding_of(sock) if isinstance(sock, ssl.SSLSocket) else b""
    challenge = ClientChallenge(purpose, mode, key, identity, attest, str(target), binding)
    outgoing = challenge.opening()
    while True:
        sock.settimeout(_seconds(deadline))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            sock.sendall(outgoing)  # refused already? then the reason is waiting to be read
        if challenge.peer is not None:
            return challenge.peer, mode
        outgoing = b""
        while not outgoing:
            outgoing = challenge.feed(_recv_exactly(sock, challenge.need, deadline))


def _client_mode(target: ListenerContact, credentials: Credentials) -> tuple[Mode, bytes]:
    if credentials.secret is not None:
        return Mode.SECRET, credentials.secret.reveal()
    if target.token:
        return Mode.TOKEN, target.token.encode()
    return Mode.SAME_USER, b""


def _attest_listener(sock: socket.socket, target: ListenerContact) -> None:
    unix = isinstance(target.address, UnixAddress)
    uid = unix_peer_uid(sock) if unix else tcp_peer_uid(sock)
    if uid is None:
        raise AuthenticationError(
            f"the kernel does not say which user listens at {target}; use the listener's whole contact"
            " (with its token) or give both ends a secret"
        )
    if not same_user(uid):
        raise AuthenticationError(
            f"refused to talk to {target}: {advice(Refusal.OTHER_USER, '')} (uid {uid})"
        )


def _recv_exactly(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    data = bytearray()
    while len(data) < size:
        sock.settimeout(_seconds(deadline))
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _seconds(deadline: Deadline) -> float | None:
    """For ``settimeout``, where 0 would mean "do not block at all"."""
    remaining = deadline.remaining()
    return None if remaining is None else max(0.001, remaining)
