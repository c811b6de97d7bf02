"""The network link between two hosts, made and set up by calls of the kernel, which need no program."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from typing import Final

NAME: Final = "kvplug0"
"""Of the link at either end."""

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_NEW_LINK, _ERROR = 16, 2
_REQUEST, _ACK, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400
_IFLA_NAME, _IFLA_INFO, _IFLA_NET_NS_FD = 3, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1

_GET_FLAGS, _SET_FLAGS, _SET_ADDRESS = 0x8913, 0x8914, 0x8916
_UP, _RUNNING = 1, 0x40
_RUNNING_S = 3.0


def join(other_net: int) -> None:
    """Make a link between the network namespace of this thread and the one of the descriptor ``other_net``.

    Raises:
        OSError: it is not permitted, or the kernel has no such links (veth).
    """
    link = bytes(16) + _attribute(_IFLA_NAME, NAME.encode() + b"\0")
    there = link + _attribute(_IFLA_NET_NS_FD, struct.pack("=i", other_net))
    info = _attribute(_INFO_KIND, b"veth") + _attribute(_INFO_DATA, _attribute(_VETH_PEER, there))
    body = link + _attribute(_IFLA_INFO, info)
    flags = _REQUEST | _ACK | _CREATE | _EXCLUSIVE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.send(_HEADER.pack(_HEADER.size + len(body), _NEW_LINK, flags, 1, 0) + body)
        answer = sock.recv(1 << 16)
    (number,) = struct.unpack_from("=i", answer, _HEADER.size)
    if _HEADER.unpack_from(answer)[1] == _ERROR and number:
        failure = "a link between two network namespaces cannot be made"
        raise OSError(-number, f"{failure}: {os.strerror(-number)}")


def give_address(address: str) -> None:
    """Give this end of the link an IPv4 address. The others of its network are at the other end.

    Raises:
        OSError: it is not permitted, or there is no link.
    """
    _control(_SET_ADDRESS, NAME, struct.pack("=H2x4s8x", socket.AF_INET, socket.inet_aton(address)))


def turn(on: bool, name: str = NAME) -> None:
    """Turn this end of the link on or off. While it is off, what either end sends is lost without a word.

    Raises:
        OSError: it is not permitted, or there is no link.
    """
    _control(_SET_FLAGS, name, struct.pack("=H14x", _flags(name) & ~_UP | (_UP if on else 0)))


def wait_until_running() -> None:
    """Wait, for a moment, until the kernel says that this end of the link runs: up to a second after it was
    turned on at both ends. Some libraries leave out an interface that does not.
    """
    limit = time.monotonic() + _RUNNING_S
    while not _flags(NAME) & _RUNNING and time.monotonic() < limit:
        time.sleep(0.01)


def _flags(name: str) -> int:
    return int(struct.unpack_from("=16xH", _control(_GET_FLAGS, name, bytes(16)))[0])


def _control(request: int, name: str, value: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return fcntl.ioctl(sock, request, struct.pack("=16s24s", name.encode(), value))


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)
