"""Connections whose two ends have authenticated each other."""

from __future__ import annotations

import array
import builtins
import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

import attrs

from kvplug.config.addresses import Address
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
from kvplug.net.fork import close_after_fork, close_fd_after_fork, close_sockets, no_fork
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.challenge import Exchange, Mode, introduce
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import PeerIdentity, encode_identity, same_user, unix_peer_uid
from kvplug.net.trust.relay import plain_end
from kvplug.net.trust.tls import binding_of, refusal_of, wrap_dialled
from kvplug.net.wire import values
from kvplug.net.wire.frames import HEADER_SIZE, MAGIC, FrameKind, decode_header, encode_header

DIAL_TIMEOUT_S = 10.0
"""The default timeout of :meth:`Connection.dial`."""
_RETRY_FIRST_S, _RETRY_MAX_S, _SHORTEST_TRY_S = 0.01, 0.25, 0.05
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))

_SIZE_OF_FD: Final = array.array("i").itemsize
_KIND_AT = 6
_MAX_REASON = 1000  # characters
_MAX_PAYLOAD = 8192


@attrs.define(eq=False)
class Connection:
    """A proven connection. The caller that gets it owns and closes it. A forked child closes its copy."""

    sock: socket.socket = attrs.field(repr=False)
    """Blocking and without a timeout when handed over. Nothing after the proof has been read from it."""
    peer: PeerIdentity
    """The process at the other end."""
    purpose: str
    """The purpose that both ends have proved."""
    mode: Mode
    """How the two ends proved themselves."""
    address: str
    """The listener's address."""
    since: float = attrs.field(factory=time.monotonic, init=False, repr=False)
    """When both ends had proved themselves, by ``time.monotonic``."""

    def __attrs_post_init__(self) -> None:
        close_after_fork(self.sock)

    @classmethod
    def dial(
        cls,
        contact: str,
        credentials: Credentials,
        purpose: str,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        label: str = "",
    ) -> Self:
        """Connect to the listener at ``contact``; both ends prove themselves.

        ``purpose`` must equal the listener's. ``label`` names this process to the listener.

        Raises:
            InsecureAddressError: it is a TCP address, and neither a secret nor TLS is set; nothing is
                dialled.
            PeerGoneError: no process listens there, or it hung up. Not retried (see :meth:`dial_until`).
            AuthenticationError: one end did not prove itself. The message explains what to check.
            TimeoutError: the listener did not answer in time (10 s by default).
            ConfigError: a TLS file cannot be used.
            WireError: ``contact`` is malformed.
            ResourceExhaustedError: this process, or the listener's, has no free descriptor or cannot start
                more threads.
        """
        address, deadline = Address.parse_contact(contact), Deadline.after(timeout, DIAL_TIMEOUT_S)
        where, mode = str(address), credentials.mode_at(address)
        with NamedExhaustion(f"connecting to {where}"):
            sock = _connect(address, deadline)
            try:
                with _in_words(where):
                    sock.settimeout(_seconds(deadline))
                    if mode is Mode.SAME_USER:
                        _check_listener(sock, where)  # before the listener gets a single byte
                    if credentials.tls is not None and not address.is_unix:
                        sock = wrap_dialled(sock, credentials.tls, address.host)
                    binding = binding_of(sock) if isinstance(sock, ssl.SSLSocket) else b""
                    identity = encode_identity(PeerIdentity.of_this_process(label))
                    peer = run_challenge(
                        sock, introduce(purpose, mode, credentials.key, identity, where, binding), deadline
                    )
                    sock.settimeout(None)
                    if isinstance(sock, ssl.SSLSocket):
                        sock = plain_end(sock, where)
            except BaseException:
                close_sockets(sock)
                raise
        return cls(sock, peer, purpose, mode, where)

    @classmethod
    def dial_until(
        cls,
        contact: str,
        credentials: Credentials,
        purpose: str,
        deadline: Deadline,
        *,
        label: str = "",
        stop: threading.Event | None = None,
    ) -> Self:
        """Repeat :meth:`dial` until a process listens there, at most until ``deadline``.

        Raises:
            TimeoutError: no listener started there in time. Names the address and the time spent.
            ResourceExhaustedError: the listener's last answer was that its process lacks a resource. Raised
                at once if this process lacks one.
            ClosedError: ``stop`` was set, perhaps in the pause between two tries.
            Other errors of :meth:`dial`, at once.
        """
        began, pause, address = time.monotonic(), _RETRY_FIRST_S, Address.parse_contact(contact)
        stop = stop or threading.Event()
        last: KvplugError | None = None
        while not stop.is_set():
            limit = max(_SHORTEST_TRY_S, deadline.within(DIAL_TIMEOUT_S).remaining() or 0.0)
            try:
                return cls.dial(contact, credentials, purpose, limit, label=label)
            except (PeerGoneError, TimeoutError, ResourceExhaustedError) as e:
                if isinstance(e, ResourceExhaustedError) and e.__cause__ is not None:
                    raise  # this process lacks it; the listener's shortage may end in a moment
                # A try without an answer keeps the listener's shortage, since the last try may be short.
                if not (isinstance(e, TimeoutError) and isinstance(last, ResourceExhaustedError)):
                    last = e
                if deadline.expired:
                    where = f"at {address} in {time.monotonic() - began:.1f} s (last: {last})"
                    if isinstance(last, ResourceExhaustedError):
                        text = f"no connection was made {where}"
                        raise ResourceExhaustedError(text, resource=last.resource) from e
                    raise TimeoutError(f"no listener answered {where}") from e
            stop.wait(deadline.within(pause).remaining())
            pause = min(pause * 2, _RETRY_MAX_S)
        raise ClosedError(f"stopped waiting for {address}: this end was closed")

    def __str__(self) -> str:
        return self.describe

    @property
    def describe(self) -> str:
        """The peer and the address, for messages."""
        return f"{self.peer} ({self.purpose} at {self.address})"

    @property
    def is_same_user(self) -> bool:
        """Whether the other end runs as this process's user, according to the kernel. True only
        over Unix sockets."""
        if self.sock.family != socket.AF_UNIX:
            return False
        try:
            uid = unix_peer_uid(self.sock)
        except OSError:
            return False
        return same_user(uid)

    def dup(self) -> Self:
        """Return a connection with another descriptor of the same socket. Raises OSError."""
        with no_fork:
            return attrs.evolve(self, sock=self.sock.dup())

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once closed."""
        return self.sock.fileno()

    def send(self, data: bytes, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        """Send all of ``data``, and the descriptors with its first byte. The caller still owns the
        descriptors.

        Raises:
            TimeoutError, PeerGoneError: the other end does not receive the data, or is gone.
            ResourceExhaustedError: too many descriptors are in transit, or the peer has declined.
        """
        if fds and not data:
            raise ValueError("descriptors must be sent together with bytes, but there are no bytes")
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = 0
        try:
            while sent < len(data):
                with self._limited(deadline, "sending to", "received nothing in time"):
                    sent += self.sock.sendmsg([memoryview(data)[sent:]], control)
                control = []
        except (TimeoutError, PeerGoneError):
            with contextlib.suppress(OSError):  # it may have declined before it hung up
                self.raise_if_declined(self.sock.recv(HEADER_SIZE, socket.MSG_DONTWAIT), Deadline.after(0))
            raise

    def receive(self, nbytes: int, deadline: Deadline) -> bytes:
        """Receive exactly ``nbytes``.

        Raises:
            TimeoutError, PeerGoneError: they did not arrive; the connection is unusable.
            ResourceExhaustedError: this process, or the peer's, lacks a resource.
        """
        return self.receive_fds(nbytes, 0, deadline)[0]

    def receive_some(self, nbytes: int, deadline: Deadline) -> bytes:
        """Receive at least one byte and at most ``nbytes``. Raises TimeoutError, PeerGoneError."""
        return self._receive(nbytes, 0, deadline, [])

    def receive_fds(self, nbytes: int, max_fds: int, deadline: Deadline) -> tuple[bytes, list[int]]:
        """Receive exactly ``nbytes`` and the descriptors sent with them. The caller owns these; they are
        close-on-exec.

        Raises:
            TimeoutError, PeerGoneError: they did not arrive; the connection is unusable.
            WireError: more than ``max_fds`` descriptors arrived.
            ResourceExhaustedError: this process cannot open more descriptors, or the peer lacks a resource.
        """
        data, fds = b"", list[int]()
        try:
            while len(data) < nbytes:
                data += self._receive(nbytes - len(data), max_fds, deadline, fds)
                self.raise_if_declined(data, deadline)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return data, fds

    def _receive(self, nbytes: int, max_fds: int, deadline: Deadline, fds: list[int]) -> bytes:
        """Receive at least one byte and at most ``nbytes``, and append the descriptors that come with them to
        ``fds``, up to ``max_fds`` in total. Raises as :meth:`receive_fds`."""
        with self._limited(deadline, "receiving from", "sent nothing in time"):
            room = socket.CMSG_SPACE(max_fds * _SIZE_OF_FD)
            self.sock.recv(1, socket.MSG_PEEK)  # waits
            with no_fork:
                chunk, controls, flags, _ = self.sock.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
                came = _fds_in(controls)
                fds += came
                for fd in came:
                    close_fd_after_fork(fd)
            if len(fds) > max_fds or (flags & socket.MSG_CTRUNC and len(came) >= max_fds):
                raise WireError(f"{self.describe} handed over more than {max_fds} descriptors")
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not chunk:
            raise PeerGoneError(f"{self.describe} hung up")
        return chunk

    @contextlib.contextmanager
    def _limited(self, deadline: Deadline, doing: str, late: str) -> Iterator[None]:
        """Limit the socket's operations in the block by the deadline, and map their errors to kvplug's."""
        try:
            self.sock.settimeout(_seconds(deadline))
            yield
            self.sock.settimeout(None)
        except KvplugError:
            raise
        except OSError as e:
            NamedExhaustion.check(e, f"{doing} {self.describe}")
            if isinstance(e, builtins.TimeoutError):
                raise TimeoutError(f"{self.describe} {late}") from e
            raise PeerGoneError(f"{self.describe} hung up") from e

    def raise_if_declined(self, data: bytes, deadline: Deadline) -> None:
        """Raise if ``data``, the first bytes of a message, begin a :meth:`decline`. Reads the rest of it.

        Raises:
            ResourceExhaustedError: the peer has declined, since its process lacks that resource.
            PeerGoneError, TimeoutError, WireError: the peer has declined, but the message is incomplete.
        """
        if data[: len(MAGIC)] != MAGIC or data[_KIND_AT : _KIND_AT + 1] != bytes([FrameKind.LACK]):
            return
        data = self._filled_up(data, HEADER_SIZE, deadline)
        header = decode_header(data[:HEADER_SIZE], max_length=_MAX_PAYLOAD)
        data = self._filled_up(data, HEADER_SIZE + header.length, deadline)
        raise shortage_in(data[HEADER_SIZE:], self.describe)

    def _filled_up(self, data: bytes, nbytes: int, deadline: Deadline) -> bytes:
        while len(data) < nbytes:
            data += self.receive_some(nbytes - len(data), deadline)
        return data

    def decline(self, shortage: ResourceExhaustedError) -> None:
        """Notify the peer of the resource that this process lacks. Never waits; if this fails, the peer only
        sees the connection end."""
        decline(self.sock, shortage)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        close_sockets(self.sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tune(sock: socket.socket) -> None:
    """Set the options of every TCP connection of kvplug: no delay, and probes that notice a vanished host.

    The peer's kernel answers the probes, even for a stopped process.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


@contextlib.contextmanager
def _in_words(where: str) -> Iterator[None]:
    """Map foreign exceptions of a dial to kvplug's."""
    try:
        yield
    except KvplugError:
        raise
    except ssl.SSLError as e:  # in the middle of the proof: a listener refuses our certificate only now
        raise refusal_of(e, where) from e
    except (OSError, EOFError) as e:
        if isinstance(e, builtins.TimeoutError):
            raise TimeoutError(f"{where} did not answer in time") from e
        if isinstance(e, ConnectionRefusedError):
            raise PeerGoneError(f"no process listens at {where}") from e
        if isinstance(e, EOFError | ConnectionError):
            raise PeerGoneError(
                f"{where} hung up before the proof was complete: it is shutting down, overloaded,"
                " or not a kvplug listener",
                code="hung up",
            ) from e
        raise PeerGoneError(f"{where} cannot be reached: {e.strerror or e}", code="no route") from e


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    ends: Any = [(socket.AF_UNIX, address.sockaddr)] if address.is_unix else address.resolve()
    error: PeerGoneError | TimeoutError | None = None
    for family, sockaddr in ends:
        try:
            with _in_words(str(address)):
                return _connect_to(family, sockaddr, deadline)
        except (PeerGoneError, TimeoutError) as e:
            error = e
    raise error or PeerGoneError(f"{address} cannot be resolved to an address to dial")


def _connect_to(family: int, sockaddr: Any, deadline: Deadline) -> socket.socket:
    with no_fork:
        sock = socket.socket(family, socket.SOCK_STREAM)
        close_after_fork(sock)
    try:
        while True:
            sock.settimeout(_seconds(deadline))
            try:
                sock.connect(sockaddr)
                break
            except BlockingIOError:
                # The backlog of the Unix socket is full. The kernel reports this at once instead of waiting.
                if deadline.expired:
                    raise builtins.TimeoutError from None
                time.sleep(0.005)
        if family != socket.AF_UNIX:
            if sock.getsockname() == sock.getpeername():
                # No listener uses this port in the ephemeral range, so the kernel chose it for our own end
                # too and connected the socket to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
            tune(sock)
        return sock
    except BaseException:
        close_sockets(sock)
        raise


def _check_listener(sock: socket.socket, where: str) -> None:
    uid = unix_peer_uid(sock)
    if not same_user(uid):
        raise AuthenticationError(
            f"refused to connect to {where}: it belongs to another user of this host (uid {uid}); run both"
            " ends as one user or with a secret"
        )


def run_challenge(sock: socket.socket, challenge: Exchange, deadline: Deadline) -> PeerIdentity:
    """Run one end of a challenge over the socket.

    Raises:
        EOFError: the other end hung up.
        OSError, AuthenticationError, ResourceExhaustedError: the connection or the challenge failed.
    """
    message: bytes | None = None
    while True:
        try:
            outgoing, size = challenge.send(message)  # type: ignore[arg-type]  # None: the first one
        except StopIteration as proven:
            return proven.value  # type: ignore[no-any-return]
        sock.settimeout(_seconds(deadline))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            sock.sendall(outgoing)  # if a listener has refused us, its reason is waiting to be read
        received = bytearray()
        while len(received) < size:
            sock.settimeout(_seconds(deadline))
            chunk = sock.recv(size - len(received))
            if not chunk:
                raise EOFError
            received += chunk
        message = bytes(received)


def _fds_in(controls: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in controls:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % _SIZE_OF_FD])
    return fds.tolist()


def _seconds(deadline: Deadline) -> float | None:
    """Return the seconds left for ``settimeout``, where 0 would mean "do not block at all"."""
    remaining = deadline.remaining()
    return None if remaining is None else max(0.001, remaining)


# -- a refusal instead of the message that the peer expects ------------------------------------------


def decline(sock: socket.socket, shortage: ResourceExhaustedError) -> None:
    """Send the resource that this process lacks. Never waits; if this fails, the peer only sees the
    connection end."""
    payload = values.encode([shortage.resource, str(shortage)[:_MAX_REASON]])
    with contextlib.suppress(OSError):
        sock.send(encode_header(FrameKind.LACK, len(payload)) + payload, socket.MSG_DONTWAIT)


def shortage_in(payload: bytes | bytearray, who: str) -> ResourceExhaustedError:
    """Decode the payload of a LACK frame.

    Raises:
        WireError: the payload is malformed.
    """
    match values.decode(payload):
        case [str(resource), str(reason)]:
            text = f"{who} lacks a resource now: {peer_text(reason)}"
            return ResourceExhaustedError(text, resource=peer_text(resource))
    raise WireError(f"{who} declined a connection without naming the resource that it lacks")
