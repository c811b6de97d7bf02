"""Which user holds the other end of a connection on this host, on the kernel's word.

Unix sockets carry it (``SO_PEERCRED``). For loopback TCP, Linux knows the owner of every socket: the peer's
socket is the one whose local address is our remote one. ``sock_diag`` answers for exactly that one. Where it
is missing, ``/proc/net/tcp`` and ``tcp6`` list all sockets of the host: reading them takes a second if there
are many.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

import attrs

from kvplug.config.addresses import Address, UnixAddress
from kvplug.net.exhaustion import raise_if_exhausted
from kvplug.net.trust.sockdiag import tcp_owner

_UCRED = struct.Struct("iII")
_ESTABLISHED = "01"
_IS_ESTABLISHED = 1
_LISTEN = "0A"
HAS_PROC_NET = os.path.exists("/proc/self/net/tcp")


def unix_peer_uid(sock: socket.socket) -> int | None:
    """Effective uid of the process that connected, or that called ``listen``; ``None``: unknown."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


class NoSocketDiagError(Exception):
    """The kernel does not answer questions about one socket: only its tables show the owner."""


def tcp_peer_uid(sock: socket.socket) -> int | None:
    """Uid that owns the socket at the other end of a loopback connection; ``None``: unknown.

    Only an established socket that still has an inode counts: one whose owner has closed it is shown
    as belonging to root. A listener's socket has an inode only once it was accepted, so a client asks
    after it has received the first bytes from there.
    """
    try:
        return tcp_peer_uid_at_once(sock)
    except NoSocketDiagError:
        return tcp_peer_uids([sock])[0]


def tcp_peer_uid_at_once(sock: socket.socket) -> int | None:
    """The same, in microseconds.

    Raises:
        NoSocketDiagError: ask :func:`tcp_peer_uids`.
        ResourceExhaustedError: the process has no free descriptor to ask.
    """
    ours, theirs = sock.getsockname()[:2], sock.getpeername()[:2]
    try:
        found = tcp_owner(theirs, ours)
        if found is None and tcp_owner(ours, theirs) is None:
            raise NoSocketDiagError  # it does not know our own socket either
    except OSError as e:
        raise_if_exhausted(e, "looking up the user of a connection")
        raise NoSocketDiagError from e
    return found.uid if found is not None and found.state == _IS_ESTABLISHED and found.inode else None


def tcp_peer_uids(socks: Sequence[socket.socket]) -> list[int | None]:
    """The same for several connections, from the tables of all sockets of the host, which are read once."""
    wanted: dict[tuple[str, str], int] = {}
    uids: list[int | None] = [None] * len(socks)
    for number, sock in enumerate(socks):
        try:
            ours, theirs = _keys(sock.getsockname()), _keys(sock.getpeername())
        except OSError:
            continue  # it is gone
        wanted.update({(remote, local): number for remote in theirs for local in ours})
    for _ in range(3):  # the table may change under the reader, and a row be missed
        if not wanted:
            break
        for row in _rows():
            number = wanted.get((row.local, row.remote), -1)
            if number >= 0 and row.state == _ESTABLISHED and row.inode:
                uids[number] = row.uid
        wanted = {key: number for key, number in wanted.items() if uids[number] is None}
    return uids


def same_user(uid: int) -> bool:
    """Whether ``uid``, as the kernel showed it to us, is the user this process runs as.

    In a user namespace the kernel shows every user without a mapping as the overflow uid (65534, "nobody").
    A process that itself has that uid cannot distinguish such users and gets False.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to find out.
    """
    if uid != os.geteuid():
        return False
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="utf-8") as f:
            if int(f.read()) != uid:
                return True
        with open("/proc/self/uid_map", encoding="utf-8") as f:
            return f.read().split() == ["0", "0", str(2**32 - 1)]
    except OSError as e:
        raise_if_exhausted(e, "checking the user of a connection")
        return True


def owner_of(address: Address) -> str:
    """ "pid 12 (name)" of the process that listens at ``address``, or ``""`` where /proc does not say."""
    inodes = set[int]()
    with contextlib.suppress(OSError):  # for a message
        inodes.update(
            _unix_inodes(address) if isinstance(address, UnixAddress) else _tcp_inodes(address.port)
        )
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, _listdir("/proc")):
        for fd in _listdir(f"/proc/{pid}/fd"):
            try:
                if os.readlink(f"/proc/{pid}/fd/{fd}") not in wanted:
                    continue
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as f:
                    return f"pid {pid} ({f.read().strip()})"
            except OSError as e:
                if e.errno == errno.EACCES:
                    break
    return ""


@attrs.frozen
class _Row:
    local: str
    remote: str
    state: str
    uid: int
    inode: int


def _rows() -> Iterator[_Row]:
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{table}", encoding="utf-8") as f:
                next(f, None)
                for line in f:
                    fields = line.split()
                    yield _Row(fields[1], fields[2], fields[3], int(fields[7]), int(fields[9]))
        except FileNotFoundError:
            continue


def _keys(sockaddr: tuple[str, int]) -> tuple[str, ...]:
    """How the tables write an address: as itself, and an IPv4 one also as a mapped IPv6 one.

    32-bit words in the machine's byte order, each printed as one hexadecimal number.
    """
    number = ipaddress.ip_address(sockaddr[0].partition("%")[0])
    forms = [number.packed]
    if isinstance(number, ipaddress.IPv4Address):
        forms.append(b"\0" * 10 + b"\xff\xff" + number.packed)
    elif number.ipv4_mapped is not None:
        forms.append(number.ipv4_mapped.packed)
    return tuple(
        "".join(f"{int.from_bytes(form[i : i + 4], sys.byteorder):08X}" for i in range(0, len(form), 4))
        + f":{sockaddr[1]:04X}"
        for form in forms
    )


def _tcp_inodes(port: int) -> Iterator[int]:
    for row in _rows():
        if row.state == _LISTEN and row.local.endswith(f":{port:04X}"):
            yield row.inode


def _unix_inodes(address: UnixAddress) -> Iterator[int]:
    shown = address.name if address.is_path else "@" + address.name
    try:
        with open("/proc/self/net/unix", encoding="utf-8", errors="replace") as f:
            for line in f:
                fields = line.split(maxsplit=7)
                if len(fields) == 8 and fields[7].rstrip("\n") == shown:
                    yield int(fields[6])
    except FileNotFoundError:
        return


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
