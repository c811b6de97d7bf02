"""Restricts connections to the ports that Mooncake opens in this process.

Mooncake listens on all interfaces whatever address it is given, and writes a connection's data into memory
that the process has registered. So its listening sockets get a filter (``SO_ATTACH_FILTER``, man 7 socket):
the kernel drops packets from other hosts, and the port does not answer. This needs no privilege. The filter
cannot be removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_SO_ATTACH_FILTER: Final = 26
_SO_LOCK_FILTER: Final = 44
_NET: Final = -0x100000 & 0xFFFFFFFF
"""Offsets from here on are offsets in the packet's IP header (linux/filter.h)."""
_PROTOCOL: Final = -0x1000 & 0xFFFFFFFF
"""The offset of the packet's protocol."""
_SOURCE: Final = 12
"""The offset of the address in the IPv4 header."""
_LOAD_HALF, _LOAD_BYTE, _IF_EQUAL, _RETURN = 0x28, 0x30, 0x15, 0x06
_LISTENING, _TIME_WAIT = "0A", "06"  # net/tcp_states.h

CLOSED: Final = ((_RETURN, 0, 0, 0),)
LOOPBACK: Final = (
    (_LOAD_HALF, 0, 0, _PROTOCOL),
    (_IF_EQUAL, 0, 3, 0x0800),  # IPv4, else drop
    (_LOAD_BYTE, 0, 0, _NET + _SOURCE & 0xFFFFFFFF),
    (_IF_EQUAL, 0, 1, 127),
    (_RETURN, 0, 0, 0xFFFFFFFF),
    (_RETURN, 0, 0, 0),
)
"""A program of the kernel's classic packet filter."""

Program = tuple[tuple[int, int, int, int], ...]


class StrangerError(Exception):
    """Another host connected before the filter was in place."""


def restrict(program: Program) -> None:
    """Attach the filter to every listening TCP socket of this process.

    Raises:
        OSError: the system has no such filters.
        StrangerError: another host connected before.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    given = struct.pack("HP", len(program), ctypes.addressof(code))
    ports = set()
    for sock in _listening():
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, given)
            sock.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)
            ports.add(sock.getsockname()[1])
    if any(program is CLOSED or not is_local for is_local in _connected_to(ports)):
        raise StrangerError("another host connected while Mooncake opened its ports")


def _listening() -> Iterator[socket.socket]:
    """Duplicates of the listening TCP sockets."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a socket, or the descriptor of the listing itself
            sock = socket.socket(fileno=os.dup(int(fd)))
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                yield sock
            else:
                sock.close()


def _connected_to(ports: set[int]) -> Iterator[bool]:
    """For each connection to one of these ports of this host, whether the other end is on loopback."""
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, remote, state, *_ = line.split()
            if int(local.rpartition(":")[2], 16) in ports and state not in (_LISTENING, _TIME_WAIT):
                address = remote.rpartition(":")[0]
                is_mapped = len(address) == 8 or address[:24] == "0" * 16 + "FFFF0000"
                yield is_mapped and address[-2:] == "7F"
