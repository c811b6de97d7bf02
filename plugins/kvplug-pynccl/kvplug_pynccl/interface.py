"""Which network interface NCCL listens on: the one that has the configured address.

NCCL takes interfaces by name, from ``NCCL_SOCKET_IFNAME``, which it reads once in a process. Where that is
not set, the first endpoint sets it.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path
from typing import Final

from kvplug import ConfigError, TransportError
from kvplug.transport import Address, NamedExhaustion, PeerIdentity

logger = logging.getLogger(__name__)

VARIABLE: Final = "NCCL_SOCKET_IFNAME"
_SIOCGIFCONF: Final = 0x8912
_IFREQ: Final = 40
_MAX_INTERFACES: Final = 256

_bound = ""


def bind_to(host: str) -> None:
    """Make NCCL listen on ``host``'s interface only, unless the environment names another one.

    Raises:
        ConfigError: no interface here has that address.
    """
    global _bound
    current = os.environ.get(VARIABLE)
    if current and current != _bound:
        return
    name = f"={interface_of(host)}"
    if current and current != name:
        logger.warning(
            "NCCL of this process listens on %s already, and the host %s is on %s",
            current[1:],
            host,
            name[1:],
        )
        return
    os.environ[VARIABLE] = _bound = name


def check_reach(peer: PeerIdentity) -> None:
    """Raise if it is known that a peer cannot connect to NCCL of this process.

    Raises:
        TransportError: NCCL is bound to loopback, and the peer is on another host or network namespace.
    """
    bound, here = os.environ.get(VARIABLE, ""), PeerIdentity.of_this_process()
    remote = any(
        ours and theirs and ours != theirs
        for ours, theirs in ((here.boot_id, peer.boot_id), (here.net_ns, peer.net_ns))
    )
    if remote and bound.removeprefix("=") == "lo":
        raise TransportError(
            f"NCCL of {here} on {here.host} listens on loopback only ({VARIABLE} is {bound}), which {peer}"
            " cannot reach: set the host, or that variable, to an interface that both reach, before the"
            " process uses NCCL"
        )


def address_for(host: str) -> str:
    """Return where to listen beside NCCL: at an abstract Unix socket, or on TCP if other hosts are to
    connect."""
    if host.startswith("unix:") or Address(host).is_loopback:
        return "unix:"
    return str(Address(host))


def interface_of(host: str) -> str:
    """Return the name of the interface with that address; of loopback for a Unix socket.

    Raises:
        ConfigError: no interface has it.
    """
    if host.startswith("unix:"):
        host = "127.0.0.1"
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
        except (OSError, ValueError) as e:
            NamedExhaustion.check(e, f"looking up the host {host!r}")
            raise ConfigError(f"host: {host!r} is not an address of this machine: {e}") from e
    found = _interfaces_6() if address.version == 6 else _interfaces_4()
    if str(address) in found:
        return found[str(address)]
    if address.is_loopback:
        return "lo"
    raise ConfigError(f"host: no interface here has the address {address}; these are: {', '.join(found)}")


def _interfaces_4() -> dict[str, str]:
    memory = array.array("B", bytes(_MAX_INTERFACES * _IFREQ))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        filled = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", len(memory), memory.buffer_info()[0]))
    size = struct.unpack("iL", filled)[0]
    found = {}
    for at in range(0, size, _IFREQ):
        entry = memory[at : at + _IFREQ].tobytes()
        # ifreq: 16 bytes of name, then a sockaddr_in, whose address is its bytes 4 to 8
        found[socket.inet_ntoa(entry[20:24])] = entry[:16].partition(b"\0")[0].decode().partition(":")[0]
    return found


def _interfaces_6() -> dict[str, str]:
    found = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError as e:
        NamedExhaustion.check(e, "looking up the interfaces")
        return {}
    for line in lines:
        digits, *_, name = line.split()
        found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return found
