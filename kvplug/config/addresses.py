"""Addresses as text: where a listener listens, and how another process connects to it.

An operator writes ``host:port``, ``[::1]:port``, ``unix:@name`` (an abstract Unix socket: nothing in the file
system, gone with its process), ``unix:`` (the same, name generated) or ``unix:/path`` (a socket in the file
system, for containers that share a folder). A *contact* is the address that a listener hands out.
"""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Final

import attrs

from kvplug.config.messages import shown
from kvplug.errors import ConfigError, WireError

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
class TcpAddress:
    """A host (name or number, without brackets) and a port."""

    host: str
    """A name, or a number without brackets."""
    port: int
    """0: any that is free, for a listener."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@attrs.frozen
class UnixAddress:
    """A Unix socket: an abstract one, or one in the file system, whose name begins with a slash."""

    name: str
    """Without the leading NUL of an abstract one. Empty: one is to be generated."""

    def __str__(self) -> str:
        return f"unix:{self.name}" if self.is_path else f"unix:@{self.name}"

    @property
    def is_path(self) -> bool:
        """Whether it is a socket in the file system."""
        return self.name.startswith("/")

    @property
    def sockaddr(self) -> str:
        """What ``socket.bind`` takes."""
        return self.name if self.is_path else "\0" + self.name


Address = TcpAddress | UnixAddress


def parse_address(text: str, port: int | None = None) -> TcpAddress | UnixAddress:
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


def parse_server(text: str, port: int | None = None) -> TcpAddress | UnixAddress:
    """The same of a server that is dialled: its port is not 0, and its socket has a name.

    >>> parse_server("10.0.0.7", 6379)
    TcpAddress(host='10.0.0.7', port=6379)
    >>> parse_server("10.0.0.7")
    Traceback (most recent call last):
        ...
    kvplug.errors.ConfigError: bad configuration: '10.0.0.7' is not an address: the port is missing; ...

    Raises:
        ConfigError: as said.
    """
    address = parse_address(text, port)
    if address == UnixAddress("") or (isinstance(address, TcpAddress) and address.port == 0):
        raise ConfigError(f"{shown(text)} is not an address to connect to: its port or name is missing")
    return address


def _parsed(text: str, default: int | None) -> Address:
    """Raises ValueError: why it is not an address."""
    if text.startswith("unix:/"):
        return UnixAddress(check_unix_path(text.removeprefix("unix:")))
    if text.startswith("unix:"):
        name = text.removeprefix("unix:").removeprefix("@")
        if name:
            _check_bytes("name", name, MAX_UNIX_BYTES)
            if not _UNIX_NAME.fullmatch(name):
                raise ValueError(
                    "the name of an abstract Unix socket has letters, digits and ._:/-, a letter or digit"
                    " first, as in unix:@kvplug-a"
                )
        return UnixAddress(name)
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
        return TcpAddress(host, default)
    if not port:
        raise ValueError(f"the port is missing; {_FORMS}")
    if not port.isascii() or not port.isdigit():
        raise ValueError(f"{shown(port)} is not a port; {_FORMS}")
    if len(port) > 5 or int(port) > LAST_PORT:
        raise ValueError(f"the last port is {LAST_PORT}")
    return TcpAddress(host, int(port))


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


def parse_contact(text: str) -> Address:
    """The address in a contact, which another process may have sent.

    Raises:
        WireError: it is not one.
    """
    if len(text) > _MAX_CONTACT:
        raise WireError(f"not a contact: expected a string of at most {_MAX_CONTACT} characters")
    try:
        return parse_server(text)
    except ConfigError as e:
        raise WireError(e.faults[0]) from e
