"""Addresses and contacts as text: where a listener listens, and how another process connects to it.

An *address* is what an operator writes: ``host:port``, ``[::1]:port``, ``unix:@name`` (an abstract Unix
socket: nothing in the file system, gone with its process), ``unix:`` (the same, name generated) or
``unix:/path`` (a socket in the file system, for containers that share a folder). A *contact* is what a
listener hands out: an address, and on loopback TCP the token that authenticates its holder.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import sys
import urllib.parse

import attrs

from kvplug.errors import ConfigError, PeerGoneError, WireError
from kvplug.net.trust.host import boot_id, namespace

HAS_ABSTRACT_SOCKETS = sys.platform.startswith("linux") and hasattr(socket, "AF_UNIX")
_UNIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}")
_UNIX_PATH = re.compile(r"/[A-Za-z0-9._:@%+=,~/-]{1,106}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")
_MAX_CONTACT = 512
_NOT_A_CONTACT = (
    "not a contact: expected host:port, tcp://host:port?token=…, unix:@name or unix:/path, whole, as its"
    " listener gave it"
)


def local_domain() -> str:
    """Two processes with equal domains share abstract Unix sockets and loopback addresses. Opaque.

    It is ``"-"`` where the platform does not say.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to find out.
    """
    boot, net = boot_id(), namespace("net")
    return f"{boot}/{net}" if boot and net else "-"


@attrs.frozen
class TcpAddress:
    """A host (name or number, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@attrs.frozen
class UnixAddress:
    """An abstract Unix socket; ``name`` is without the leading NUL. Empty: one is to be generated.

    A name that begins with a slash is the path of a socket in the file system.
    """

    name: str

    def __str__(self) -> str:
        return f"unix:{self.name}" if self.is_path else f"unix:@{self.name}"

    @property
    def is_path(self) -> bool:
        """Whether it is a socket in the file system."""
        return self.name.startswith("/")

    @property
    def sockaddr(self) -> str:
        return self.name if self.is_path else "\0" + self.name


Address = TcpAddress | UnixAddress


@attrs.frozen
class ListenerContact:
    """An address, and the token that opens it. ``str()`` and ``repr()`` never show the token."""

    address: Address
    token: str = attrs.field(default="", repr=False)

    def __str__(self) -> str:
        return str(self.address)

    def reveal(self) -> str:
        """The text that another process needs, token included: not for logs."""
        if isinstance(self.address, UnixAddress):
            return str(self.address)
        return f"tcp://{self.address}" + (f"?token={self.token}" if self.token else "")


def parse_address(text: str) -> Address:
    """Parse an address from a configuration.

    Raises:
        ConfigError: it is not an address; the message says what one looks like.
    """
    if text.startswith("unix:/"):
        path = text.removeprefix("unix:")
        if not _UNIX_PATH.fullmatch(path) or path.endswith("/"):
            raise ConfigError(
                f"{text!r} is not an address: the path of a Unix socket has up to 107 letters, digits and"
                " ._:@%+=,~/-, as in unix:/run/kvplug/store.sock"
            )
        return UnixAddress(path)
    if text.startswith("unix:"):
        name = text.removeprefix("unix:").removeprefix("@")
        if name and not _UNIX_NAME.fullmatch(name):
            raise ConfigError(
                f"{text!r} is not an address: the name of an abstract Unix socket has up to 100 letters,"
                " digits and ._:/-, a letter or digit first, as in unix:@kvplug-a"
            )
        return UnixAddress(name)
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r} is not an address: write IPv6 in brackets, as in [::1]:29555")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{text!r} is not an address: expected host:port, [ipv6]:port, unix:@name or unix:/path"
        )
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", host):
        raise ConfigError(f"{text!r} is not an address: {host!r} cannot be a host")
    return TcpAddress(host, int(port))


def parse_contact(text: str) -> ListenerContact:
    """Parse a listener's contact; a bare address (``host:port``, ``unix:@name``) is a contact too.

    Raises:
        WireError: it is neither. The text is not repeated, since it may hold a token.
    """
    if len(text) > _MAX_CONTACT:
        raise WireError(f"not a contact: expected a string of at most {_MAX_CONTACT} characters")
    rest, _, query = text.removeprefix("tcp://").partition("?")
    token = ""
    if query:
        fields = urllib.parse.parse_qs(query, strict_parsing=False, max_num_fields=4)
        token = fields.get("token", [""])[0]
        if set(fields) != {"token"} or not _TOKEN.fullmatch(token) or rest.startswith("unix:"):
            raise WireError(_NOT_A_CONTACT)
    try:
        address = parse_address(rest)
    except ConfigError:
        # Without the cause, which repeats what it could not read.
        raise WireError(_NOT_A_CONTACT) from None
    if address == UnixAddress("") or (isinstance(address, TcpAddress) and address.port == 0):
        raise WireError(f"{rest} is not a contact: it names no host to connect to")
    return ListenerContact(address, token)


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
