"""Addresses as text: where a listener listens, and how another process connects to it.

An operator writes ``host:port``, ``[::1]:port``, ``unix:@name`` (an abstract Unix socket: nothing in the file
system, gone with its process), ``unix:`` (the same, name generated) or ``unix:/path`` (a socket in the file
system, for containers that share a folder). A *contact* is the address that a listener hands out.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
from typing import Final

import attrs

from kvplug.config.messages import shown
from kvplug.errors import ConfigError, PeerGoneError, WireError

DEFAULT_HOST: Final = "unix:@kvplug"
LAST_PORT: Final = 65535
MAX_UNIX_BYTES: Final = 107
"""Of the path or name of a Unix socket: the kernel has 108, and one is a NUL."""
_UNIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
_UNIX_PATH = re.compile(r"/[A-Za-z0-9._:@%+=,~/-]*[A-Za-z0-9._:@%+=,~-]")
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_ZONE = re.compile(r"[\w.-]{1,15}", re.ASCII)
_MAX_CONTACT = 512
_FORMS = "allowed is host:port, [ipv6]:port, unix:@name or unix:/path"


@attrs.frozen
class Address:
    """An address of TCP, or a Unix socket: an abstract one, or one in the file system."""

    host: str = ""
    """Of TCP: a name, or a number without brackets. Empty: it is a Unix socket."""
    port: int = 0
    """Of TCP. 0: any that is free, for a listener."""
    name: str = attrs.field(default="", kw_only=True)
    """Of a Unix socket: its path, which begins with a slash, or the name of an abstract one without its
    leading
    NUL. Empty: a name is to be generated."""

    @classmethod
    def parse(cls, text: str, port: int | None = None) -> Address:
        """The address of a listener, as an operator writes it. Looks no name up.

        Args:
            port: where the text has none; ``None``: it must have one.

        Raises:
            ConfigError: it is not an address; the message says why, and what one looks like.
        """
        try:
            return _parsed(text, port)
        except ValueError as e:
            raise ConfigError(f"{shown(text)} is not an address: {e}") from None

    @classmethod
    def parse_server(cls, text: str, port: int | None = None) -> Address:
        """The address of a server that is dialled: its port is not 0, and its socket has a name.

        >>> str(Address.parse_server("10.0.0.7", 6379))
        '10.0.0.7:6379'
        >>> Address.parse_server("10.0.0.7")
        Traceback (most recent call last):
            ...
        kvplug.errors.ConfigError: bad configuration: '10.0.0.7' is not an address: the port is missing; ...

        Args:
            port: as of :meth:`parse`.

        Raises:
            ConfigError: it is not the address of a server.
        """
        address = cls.parse(text, port)
        if not (address.name or address.port):
            raise ConfigError(f"{shown(text)} is not an address to connect to: its port or name is missing")
        return address

    @classmethod
    def parse_contact(cls, text: str) -> Address:
        """The address in a contact, which another process may have sent.

        Raises:
            WireError: it is not one.
        """
        if len(text) > _MAX_CONTACT:
            raise WireError(f"not a contact: expected a string of at most {_MAX_CONTACT} characters")
        try:
            return cls.parse_server(text)
        except ConfigError as e:
            raise WireError(e.faults[0]) from e

    @staticmethod
    def beside(host: str) -> str:
        """Where a server with this configured ``host`` listens for more connections of its peers on this
        host.

        Beside the socket, for a path; ``unix:`` (an abstract socket with a generated name) for other hosts.

        >>> Address.beside("unix:/run/kvplug/store.sock")[:28]
        'unix:/run/kvplug/store.sock-'
        """
        return f"{host}-{secrets.token_hex(6)}" if host.startswith("unix:/") else "unix:"

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.name}" if self.is_path else f"unix:@{self.name}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return not self.host

    @property
    def is_path(self) -> bool:
        """Whether it is a socket in the file system."""
        return self.name.startswith("/")

    @property
    def sockaddr(self) -> str:
        """What ``socket.bind`` takes for a Unix socket."""
        return self.name if self.is_path else "\0" + self.name

    def resolve(self) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        """The family and the socket address of everything that an address of TCP stands for, IPv4 first.

        Raises:
            PeerGoneError: the name is not known (perhaps not yet).
        """
        try:
            found = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
        except (OSError, UnicodeError) as e:
            raise PeerGoneError(f"the host of {self} is not known: {e}") from e
        ends = dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found)
        return sorted(ends, key=lambda end: end[0] != socket.AF_INET)  # type: ignore[arg-type]

    @property
    def is_loopback(self) -> bool:
        """Whether the address of TCP can be reached from this host only: each address that it stands for is a
        loopback one.

        ``0.0.0.0``, ``::`` and names that cannot be resolved are not.
        """
        try:
            return all(ip_address(sockaddr[0]).is_loopback for _, sockaddr in self.resolve())
        except PeerGoneError:
            return False


def ip_address(number: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address in a socket address: without its scope, and IPv4 where IPv6 only carries it."""
    address = ipaddress.ip_address(number.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _parsed(text: str, default: int | None) -> Address:
    """Raises ValueError: why it is not an address."""
    if text.startswith("unix:/"):
        return Address(name=check_unix_path(text.removeprefix("unix:")))
    if text.startswith("unix:"):
        name = text.removeprefix("unix:").removeprefix("@")
        if name:
            _check_bytes("name", name, MAX_UNIX_BYTES)
            if not _UNIX_NAME.fullmatch(name):
                raise ValueError(
                    "the name of an abstract Unix socket has letters, digits and ._:/-, a letter or digit"
                    " first, as in unix:@kvplug-a"
                )
        return Address(name=name)
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, ""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"only IPv6 stands in brackets; {_FORMS}")
    elif ":" in host:
        raise ValueError("write IPv6 in brackets and with a port, as in [::1]:29555")
    check_host(host)
    if not port and default is not None and host in (text, text[1:-1]):
        return Address(host, default)
    if not port:
        raise ValueError(f"the port is missing; {_FORMS}")
    if not port.isascii() or not port.isdigit():
        raise ValueError(f"{shown(port)} is not a port; {_FORMS}")
    if len(port) > 5 or int(port) > LAST_PORT:
        raise ValueError(f"the last port is {LAST_PORT}")
    return Address(host, int(port))


def check_host(host: str) -> None:
    """Raises ValueError: it is neither the name nor the number of a host, and why."""
    number, percent, zone = host.partition("%")
    if ":" in host:
        if percent and not _ZONE.fullmatch(zone):
            raise ValueError(f"{shown(zone)} is not the name of an interface")
        ipaddress.IPv6Address(number)
    elif re.fullmatch(r"[0-9.]+", host):
        ipaddress.IPv4Address(host)
    elif len(host) > 253 or not all(map(_LABEL.fullmatch, host.removesuffix(".").split("."))):
        raise ValueError(f"{shown(host)} cannot be a host" if host else f"the host is missing; {_FORMS}")


def check_unix_path(path: str, limit: int = MAX_UNIX_BYTES) -> str:
    """Returns the path. Raises ValueError: no Unix socket of kvplug can have it, and why."""
    _check_bytes("path", path, limit)
    if not _UNIX_PATH.fullmatch(path):
        raise ValueError(
            "the path of a Unix socket has letters, digits and ._:@%+=,~/-, and no slash at the end, as in"
            " unix:/run/kvplug/store.sock"
        )
    return path


def _check_bytes(what: str, text: str, limit: int) -> None:
    if (count := len(os.fsencode(text))) > limit:
        raise ValueError(f"the {what} of a Unix socket has at most {limit} bytes here, and this one {count}")
