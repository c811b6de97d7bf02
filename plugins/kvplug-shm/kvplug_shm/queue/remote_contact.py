"""The network address of a queue's writer: a part of the handle."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplug import AuthenticationError, ConfigError
from kvplug.transport import Credentials, WireError
from kvplug_shm.queue.remote_keys import SALT_BYTES, Keys

VERSION: Final = 1
_TOKEN_BYTES = 32


@attrs.frozen(kw_only=True)
class RemoteContact:
    """Address, salt of the keys, and the token that replaces the secret on loopback."""

    host: str
    """A number, IPv4 or IPv6."""
    port: int
    salt: bytes
    token: str = attrs.field(default="", repr=False)
    """In hexadecimal; empty if both ends share a secret."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """The address in ZeroMQ's notation."""
        return f"tcp://{self}"

    def as_plain(self) -> dict[str, Any]:
        """For the handle. It holds the token: not for logs."""
        return {
            "version": VERSION,
            "host": self.host,
            "port": self.port,
            "salt": self.salt.hex(),
            "token": self.token,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RemoteContact:
        """The inverse of :meth:`as_plain`.

        Raises:
            WireError: it is anything else. Nothing of it is repeated.
        """
        match plain:
            case {
                "version": int(version),
                "host": str(host),
                "port": int(port),
                "salt": str(salt),
                "token": str(token),
            } if version == VERSION:
                with contextlib.suppress(ValueError):
                    ipaddress.ip_address(host.partition("%")[0])
                    raw = bytes.fromhex(salt)
                    of_token = len(bytes.fromhex(token))
                    if 0 < port < 1 << 16 and len(raw) == SALT_BYTES and of_token in (0, _TOKEN_BYTES):
                        return cls(host=host, port=port, salt=raw, token=token)
        raise WireError("the handle says nothing of the network that this version can read")

    def keys(self, credentials: Credentials) -> Keys:
        """The keys of both ends.

        Raises:
            AuthenticationError: one end has a secret and the other has none.
            InsecureAddressError: other hosts can reach the address, and there is no secret.
        """
        credentials.require_secret(str(self))
        if credentials.secret is not None:
            if self.token:
                raise AuthenticationError(
                    f"this end has a secret and the writer at {self} has none; give both ends the same"
                    " (KVPLUG_SECRET or secret_file), or neither"
                )
            return Keys(credentials.secret.reveal(), self.salt)
        if not self.token:
            raise AuthenticationError(
                f"the writer at {self} has a secret and this end has none; give both ends the same"
                " (KVPLUG_SECRET or secret_file)"
            )
        return Keys(bytes.fromhex(self.token), self.salt)


def new_contact(host: str, credentials: Credentials) -> RemoteContact:
    """A contact at ``host``, with a new salt and, where there is no secret, a new token; its port is 0.

    Raises:
        InsecureAddressError: other hosts can reach it, and there is no secret.
        ConfigError: the host is not known, or a Unix socket.
    """
    if host.startswith("unix:"):
        raise ConfigError(f"readers elsewhere need an address of TCP to come to, and the host is {host!r}")
    number = _resolved(host)
    contact = RemoteContact(
        host=number,
        port=0,
        salt=secrets.token_bytes(SALT_BYTES),
        token="" if credentials.secret is not None else secrets.token_hex(_TOKEN_BYTES),
    )
    credentials.require_secret(str(contact))
    return contact


def to_dial(host: str) -> str:
    """The address that other hosts dial for ``host``; for all interfaces that of the default route."""
    number = ipaddress.ip_address(host.partition("%")[0])
    if not number.is_unspecified:
        return host
    family, there = (socket.AF_INET, "192.0.2.1") if number.version == 4 else (socket.AF_INET6, "2001:db8::1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((there, 9))  # sends nothing: the kernel only chooses a source
        return str(probe.getsockname()[0])
    return "127.0.0.1" if number.version == 4 else "::1"


def _resolved(host: str) -> str:
    """One IP address of ``host``, IPv4 first, so that the checked address is the bound one."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"cannot listen at {host}: the host is not known: {e}") from e
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    number, *more = found[0][4]
    scope = int(more[2]) if len(more) == 3 else 0
    # By its name, which the other hosts' interfaces to that link have more often than its number.
    return f"{number}%{socket.if_indextoname(scope)}" if scope else str(number)
