"""What the host of an address stands for, and where it can be reached from."""

from __future__ import annotations

import ipaddress
import secrets
import socket

from kvplug.config.addresses import TcpAddress
from kvplug.errors import PeerGoneError
from kvplug.net.trust.identity import boot_id, namespace


def local_domain() -> str:
    """Two processes with equal domains share abstract Unix sockets and loopback addresses. Opaque.

    It is ``"-"`` where the platform does not say.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to find out.
    """
    boot, net = boot_id(), namespace("net")
    return f"{boot}/{net}" if boot and net else "-"


def unix_address(host: str) -> str:
    """Where a server with this configured ``host`` listens for more connections of its peers on this host.

    Beside the socket, for a path; ``unix:`` (an abstract socket with a generated name) for every other host.

    >>> unix_address("unix:/run/kvplug/store.sock")[:28]
    'unix:/run/kvplug/store.sock-'
    """
    return f"{host}-{secrets.token_hex(6)}" if host.startswith("unix:/") else "unix:"


def resolve(address: TcpAddress) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """The family and the socket address of everything that ``address`` stands for, IPv4 first.

    Raises:
        PeerGoneError: the name is not known (perhaps not yet).
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except (OSError, UnicodeError) as e:
        raise PeerGoneError(f"the host of {address} is not known: {e}") from e
    ends = dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found)
    return sorted(ends, key=lambda end: end[0] != socket.AF_INET)  # type: ignore[arg-type]


def is_loopback(host: str) -> bool:
    """Whether only this host can reach ``host``: every address it stands for is a loopback one.

    ``0.0.0.0``, ``::`` and names that cannot be resolved are not.
    """
    try:
        return all(_is_loopback(sockaddr[0]) for _, sockaddr in resolve(TcpAddress(host, 0)))
    except PeerGoneError:
        return False


def _is_loopback(number: str) -> bool:
    address = ipaddress.ip_address(number.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
