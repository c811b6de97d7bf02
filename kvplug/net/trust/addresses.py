"""Addresses as the kernel has them: what a host stands for, and who can reach it."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys

import attrs

from kvplug.config.addresses import TcpAddress
from kvplug.errors import PeerGoneError
from kvplug.net.trust.host import boot_id, namespace

HAS_ABSTRACT_SOCKETS = sys.platform.startswith("linux") and hasattr(socket, "AF_UNIX")


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


def generated_name() -> str:
    """A name for an abstract socket: it names its process, and cannot be guessed."""
    return f"kvplug-{os.geteuid()}-{secrets.token_hex(12)}"


@attrs.frozen
class Resolved:
    """One socket address that a host and port stand for."""

    family: int
    sockaddr: tuple[str, int] | tuple[str, int, int, int]

    @property
    def loopback(self) -> bool:
        return _is_loopback_number(self.sockaddr[0])


def resolve(address: TcpAddress) -> tuple[Resolved, ...]:
    """Every socket address that ``address`` stands for, IPv4 first.

    What is checked for being loopback is what is then bound or dialled, so that a name cannot mean
    one thing to the check and another to the connection.

    Raises:
        PeerGoneError: the name is not known (perhaps not yet).
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except (OSError, UnicodeError) as e:
        raise PeerGoneError(f"the host of {address} is not known: {e}") from e
    resolved = dict.fromkeys(
        Resolved(int(family), sockaddr)  # type: ignore[arg-type]
        for family, _, _, _, sockaddr in found
    )
    return tuple(sorted(resolved, key=lambda r: r.family != socket.AF_INET))


def is_loopback(host: str) -> bool:
    """Whether only this host can reach ``host``: every address it stands for is a loopback one.

    ``0.0.0.0``, ``::`` and names that cannot be resolved are not.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            resolved = resolve(TcpAddress(host, 0))
        except PeerGoneError:
            return False
        return bool(resolved) and all(r.loopback for r in resolved)
    return _is_loopback_number(host)


def _is_loopback_number(host: str) -> bool:
    number = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
        number = number.ipv4_mapped
    return number.is_loopback
