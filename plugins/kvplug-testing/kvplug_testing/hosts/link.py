"""The network link between two hosts: messages of rtnetlink, which need no program."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from typing import Final

NAME: Final = "kvplug0"
"""Of the link at either end."""
_PREFIX_BITS = 24

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, mask of changed flags
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_ERRNO = struct.Struct("=i")

_NEW_LINK, _NEW_ADDRESS, _ERROR = 16, 20, 2
_REQUEST, _ACK, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400
_IFLA_NAME, _IFLA_INFO, _IFLA_NET_NS_FD = 3, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_UP, _RUNNING = 1, 0x40
_GET_FLAGS = 0x8913
_INTERFACE = struct.Struct("=16sH22x")  # name, flags
_RUNNING_S = 3.0


def join(other_net: int) -> None:
    """Make a link between the network namespace of this thread and the one of the descriptor ``other_net``.

    Raises:
        OSError: it is not permitted, or the kernel has no such links (veth).
    """
    name = _attribute(_IFLA_NAME, NAME.encode() + b"\0")
    there = _attribute(_IFLA_NET_NS_FD, struct.pack("=i", other_net))
    peer = _attribute(_VETH_PEER, _LINK.pack(0, 0, 0, 0, 0) + name + there)
    info = _attribute(_INFO_KIND, b"veth") + _attribute(_INFO_DATA, peer)
    body = _LINK.pack(0, 0, 0, 0, 0) + name + _attribute(_IFLA_INFO, info)
    _ask(_NEW_LINK, _CREATE | _EXCLUSIVE, body, "a link between two network namespaces cannot be made")


def give_address(address: str) -> None:
    """Give this end of the link an IPv4 address. The others of its network are at the other end.

    Raises:
        OSError: it is not permitted, or there is no link.
    """
    packed = socket.inet_aton(address)
    body = _ADDRESS.pack(socket.AF_INET, _PREFIX_BITS, 0, 0, socket.if_nametoindex(NAME))
    body += _attribute(_IFA_LOCAL, packed) + _attribute(_IFA_ADDRESS, packed)
    _ask(_NEW_ADDRESS, _CREATE | _EXCLUSIVE, body, f"{NAME} cannot have the address {address}")


def turn(on: bool, name: str = NAME) -> None:
    """Turn this end of the link on or off. While it is off, what either end sends is lost without a word.

    Raises:
        OSError: it is not permitted, or there is no link.
    """
    body = _LINK.pack(0, 0, socket.if_nametoindex(name), _UP if on else 0, _UP)
    _ask(_NEW_LINK, 0, body, f"{name} cannot be turned {'on' if on else 'off'}")


def wait_until_running() -> None:
    """Wait, for a moment, until the kernel says that this end of the link runs: up to a second after it was
    turned on at both ends. Some libraries leave out an interface that does not.
    """
    limit = time.monotonic() + _RUNNING_S
    with socket.socket() as sock:
        while time.monotonic() < limit:
            answer = fcntl.ioctl(sock, _GET_FLAGS, _INTERFACE.pack(NAME.encode(), 0))
            if _INTERFACE.unpack(answer)[1] & _RUNNING:
                return
            time.sleep(0.01)


def _attribute(kind: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def _ask(kind: int, flags: int, body: bytes, failure: str) -> None:
    request = _HEADER.pack(_HEADER.size + len(body), kind, flags | _REQUEST | _ACK, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.send(request)
        answer = sock.recv(1 << 16)
    answered = _HEADER.unpack_from(answer)[1]
    number = -_ERRNO.unpack_from(answer, _HEADER.size)[0] if answered == _ERROR else 0
    if number:
        raise OSError(number, f"{failure}: {os.strerror(number)}")
