"""One exact question to the kernel: who owns the TCP socket with these two addresses? (``sock_diag``, Linux)

A lookup takes some microseconds, however many connections the host has. The tables in ``/proc/net`` hold the
same, but must be read whole. The messages are those of ``sock_diag(7)``.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct

import attrs

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_REQUEST = 1
_ANY_STATE = 0xFFFFFFFF
_NO_COOKIE = b"\xff" * 8
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port id
_QUERY = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_ID = struct.Struct("!HH16s16s")  # ports and addresses, of the socket and of its peer
_ANSWER = struct.Struct("=BBBB48sIIIII")  # family, state, timer, retransmits, id, expires, queues, uid, inode
_TIMEOUT_S = 1.0

_Number = ipaddress.IPv4Address | ipaddress.IPv6Address


@attrs.frozen
class SocketOwner:
    """What the kernel shows of one TCP socket."""

    uid: int
    state: int
    """1 is an established connection."""
    inode: int
    """0 once its process has closed it."""


def tcp_owner(local: tuple[str, int], remote: tuple[str, int]) -> SocketOwner | None:
    """The owner of the TCP socket of this network namespace with exactly these addresses; ``None``: there is
    no such socket, or the kernel has no module ``tcp_diag``.

    Raises:
        OSError: the kernel does not answer such questions (another system, a sandbox), or the process has no
            free descriptor.
    """
    mine, theirs = _number(local[0]), _number(remote[0])
    ids = _ID.pack(local[1], remote[1], mine.packed, theirs.packed)
    family = socket.AF_INET if mine.version == 4 else socket.AF_INET6
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE) + ids + bytes(4) + _NO_COOKIE
    message = _HEADER.pack(_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + query
    with socket.socket(getattr(socket, "AF_NETLINK", -1), socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asking:
        asking.settimeout(_TIMEOUT_S)
        asking.sendto(message, (0, 0))
        answer, sender = asking.recvfrom(4096)
    if sender[0] != 0:
        raise OSError(errno.EPROTO, "an answer that is not the kernel's")
    _, kind, _, _, _ = _HEADER.unpack_from(answer)
    if kind == _NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        if -code != errno.ENOENT:
            raise OSError(-code, os.strerror(-code))
        return None
    if kind != _SOCK_DIAG_BY_FAMILY:
        raise OSError(errno.EPROTO, f"an answer of type {kind}")
    found, state, _, _, found_id, _, _, _, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # The kernel answers with a listener where there is no connection.
    their_id = _ID.unpack_from(found_id)
    size = 4 if found == socket.AF_INET else 16
    addresses = [_unmapped(ipaddress.ip_address(each[:size])) for each in their_id[2:]]
    same = [*their_id[:2], *addresses] == [local[1], remote[1], mine, theirs]
    return SocketOwner(uid, state, inode) if same else None


def _number(host: str) -> _Number:
    return _unmapped(ipaddress.ip_address(host.partition("%")[0]))


def _unmapped(number: _Number) -> _Number:
    """An IPv4 address that an IPv6 socket uses: such a connection is found as one of IPv4."""
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return number if mapped is None else mapped
