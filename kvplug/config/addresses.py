"""Addresses as text: where a listener listens, and how another process connects to it.

An operator writes ``host:port``, ``[::1]:port``, ``unix:@name`` (an abstract Unix socket, which has no file
and disappears with its process), ``unix:`` (the same with a generated name) or ``unix:/path`` (a socket in
the file system, for containers that share a folder). A *contact* is the address that a listener hands out.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from typing import Final

import attrs

from kvplug.config.messages import shown
from kvplug.errors import ConfigError, PeerGoneError, WireError

DEFAULT_HOST: Final = "unix:@kvplug"
LAST_PORT: Final = 65535
MAX_UNIX_BYTES: Final = 107
"""The longest path or name of a Unix socket. The kernel has room for 108 bytes, including a NUL."""
_UNIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
_UNIX_PATH = re.compile(r"/[A-Za-z0-9._:@%+=,~/-]*[A-Za-z0-9._:@%+=,~-]")
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_ZONE = re.compile(r"[\w.-]{1,15}", re.ASCII)
_MAX_CONTACT = 512
_FORMS = "write host:port, [ipv6]:port, unix:@name or unix:/path"


@attrs.frozen
class Address:
    """The address of a TCP socket, or of a Unix socket, which is abstract or in the file system."""

    host: str = ""
    """The TCP host: a name, or an IP address without brackets. Empty for a Unix socket."""
    port: int = 0
    """The TCP port. With 0, a listener takes any free port."""
    name: str = attrs.field(default="", kw_only=True)
    """The path of a Unix socket, which begins with a slash, or the name of an abstract one without its
    leading NUL. Empty if a name is to be generated."""

    @classmethod
    def parse(cls, text: str, port: int | None = None) -> Address:
        """Parse a listener's address, as an operator writes it. Host names are not resolved.

        Args:
            port: the port to use if the text has none. With ``None``, the text must have a port.

        Raises:
            ConfigError: the text is not an address; the message explains why, and shows the valid forms.
        """
        try:
            return _parsed(text, port)
        except ValueError as e:
            raise ConfigError(f"{shown(text)} is not an address: {e}") from None

    @classmethod
    def parse_server(cls, text: str, port: int | None = None) -> Address:
        """Parse the address of a server to dial. Its port must not be 0, and its socket must have a name.

        >>> str(Address.parse_server("10.0.0.7", 6379))
        '10.0.0.7:6379'
        >>> Address.parse_server("10.0.0.7")
        Traceback (most recent call last):
            ...
        kvplug.errors.ConfigError: bad configuration: '10.0.0.7' is not an address: the port is missing; ...

        Args:
            port: as for :meth:`parse`.

        Raises:
            ConfigError: the text is not the address of a server.
        """
        address = cls.parse(text, port)
        if not (address.name or address.port):
            raise ConfigError(f"{shown(text)} is not an address to connect to: its port or name is missing")
        return address

    @classmethod
    def parse_contact(cls, text: str) -> Address:
        """Parse the address in a contact, which another process may have sent.

        Raises:
            WireError: the text is not a contact.
        """
        if len(text) > _MAX_CONTACT:
            raise WireError(f"not a contact: expected a string of at most {_MAX_CONTACT} characters")
        try:
            return cls.parse_server(text)
        except ConfigError as e:
            raise WireError(e.faults[0]) from e

    @staticmethod
    def beside(host: str) -> str:
        """Return an address for a server's second listener, which only processes on the same host can reach.

        ``host`` is the ``host`` of the server's config. If it is the path of a socket, the second socket is
        beside it. Otherwise the address is ``unix:``, an abstract socket with a generated name.

        >>> Address.beside("unix:/run/kvplug/store.sock")[:28]
        'unix:/run/kvplug/store.sock-'
        """
        return f"{host}-{os.urandom(6).hex()}" if host.startswith("unix:/") else "unix:"

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.name}" if self.is_path else f"unix:@{self.name}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unix(self) -> bool:
        """Whether this is a Unix socket."""
        return not self.host

    @property
    def is_path(self) -> bool:
        """Whether this is a socket in the file system."""
        return self.name.startswith("/")

    @property
    def sockaddr(self) -> str:
        """The address of a Unix socket for ``socket.bind``."""
        return self.name if self.is_path else "\0" + self.name

    def resolve(self) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        """Resolve a TCP address into families and socket addresses, IPv4 first.

        Raises:
            PeerGoneError: the host name cannot be resolved; a later attempt may succeed.
        """
        try:
            found = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
        except (OSError, UnicodeError) as e:
            raise PeerGoneError(f"the host name of {self} cannot be resolved: {e}") from e
        ends = dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found)
        return sorted(ends, key=lambda end: end[0] != socket.AF_INET)  # type: ignore[arg-type]

    @property
    def is_loopback(self) -> bool:
        """Whether a TCP address resolves only to loopback addresses, which other hosts cannot reach.

        ``0.0.0.0``, ``::`` and names that cannot be resolved do not count as loopback.
        """
        try:
            return all(ip_address(sockaddr[0]).is_loopback for _, sockaddr in self.resolve())
        except PeerGoneError:
            return False


def ip_address(number: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse the IP address of a socket address. Drop its scope, and unpack an IPv4-mapped IPv6 address."""
    address = ipaddress.ip_address(number.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _parsed(text: str, default: int | None) -> Address:
    """Parse an address. Raise ValueError with the reason if the text is not one."""
    if text.startswith("unix:/"):
        return Address(name=check_unix_path(text.removeprefix("unix:")))
    if text.startswith("unix:"):
        name = text.removeprefix("unix:").removeprefix("@")
        if name and not text.startswith("unix:@"):
            raise ValueError("write unix:@name for an abstract Unix socket, or unix:/path for a file")
        if name:
            _check_bytes("name", name, MAX_UNIX_BYTES)
            if not _UNIX_NAME.fullmatch(name):
                raise ValueError(
                    "the name of an abstract Unix socket may only contain letters, digits and ._:/- and must"
                    " begin with a letter or digit, as in unix:@kvplug-a"
                )
        return Address(name=name)
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, ""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"only IPv6 addresses are written in brackets; {_FORMS}")
    elif ":" in host:
        raise ValueError("write an IPv6 address in brackets and with a port, as in [::1]:29555")
    check_host(host)
    if not port and default is not None and host in (text, text[1:-1]):
        return Address(host, default)
    if not port:
        raise ValueError(f"the port is missing; {_FORMS}")
    if not port.isascii() or not port.isdigit():
        raise ValueError(f"{shown(port)} is not a port; {_FORMS}")
    if len(port) > 5 or int(port) > LAST_PORT:
        raise ValueError(f"a port is at most {LAST_PORT}")
    return Address(host, int(port))


def check_host(host: str) -> None:
    """Raise ValueError, with the reason, if ``host`` is neither a host name nor an IP address."""
    number, percent, zone = host.partition("%")
    if ":" in host:
        if percent and not _ZONE.fullmatch(zone):
            raise ValueError(f"{shown(zone)} is not the name of an interface")
        ipaddress.IPv6Address(number)
    elif re.fullmatch(r"[0-9.]+", host):
        ipaddress.IPv4Address(host)
    elif len(host) > 253 or not all(map(_LABEL.fullmatch, host.removesuffix(".").split("."))):
        raise ValueError(f"{shown(host)} is not a host name" if host else f"the host is missing; {_FORMS}")


def check_unix_path(path: str, limit: int = MAX_UNIX_BYTES) -> str:
    """Return the path. Raise ValueError, with the reason, if kvplug cannot use it for a Unix socket."""
    _check_bytes("path", path, limit)
    if not _UNIX_PATH.fullmatch(path):
        raise ValueError(
            "the path of a Unix socket may only contain letters, digits and ._:@%+=,~/- and must not end with"
            " a slash, as in unix:/run/kvplug/store.sock"
        )
    return path


def _check_bytes(what: str, text: str, limit: int) -> None:
    if (count := len(os.fsencode(text))) > limit:
        raise ValueError(
            f"the {what} of a Unix socket may have at most {limit} bytes here; this one has {count}"
        )
