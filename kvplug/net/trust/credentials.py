"""The secret that the processes of one deployment share, and the addresses that need one."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.config.addresses import Address, TcpAddress, UnixAddress, parse_address
from kvplug.errors import ConfigError, InsecureAddressError
from kvplug.net.exhaustion import raise_if_exhausted
from kvplug.net.trust.addresses import Resolved, is_loopback

if TYPE_CHECKING:
    from kvplug.net.trust.tls import TlsFiles

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "KVPLUG_SECRET"  # noqa: S105  (the name of a variable, not a secret)
MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_HOW = "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"


class Secret:
    """Bytes that never appear in ``repr``, ``str``, a log or a pickle.

    A listener that has not yet proved itself sees a keyed hash made with it (the client proves first), so a
    short secret could be guessed offline: at least 16 bytes are required.

    >>> secret = Secret("0123456789abcdef")
    >>> secret
    <Secret>
    >>> secret.reveal()
    b'0123456789abcdef'

    Raises:
        ConfigError: it is shorter; names ``source``.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes | str, source: str = "the secret") -> None:
        # A variable may hold any bytes, which Python shows as lone surrogates.
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
        if len(raw) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{source} has {len(raw)} bytes and must have at least {MIN_SECRET_BYTES}; {_HOW}"
            )
        self._value = raw

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not serialised")

    def reveal(self) -> bytes:
        """The bytes, for deriving keys."""
        return self._value

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Secret | None:
        """What ``KVPLUG_SECRET`` holds, without white space around it; ``None`` when it is not set.

        Raises:
            ConfigError: it is too short.
        """
        text = environ.get(SECRET_VARIABLE, "").strip()
        return cls(text, SECRET_VARIABLE) if text else None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Secret:
        """What the file holds, without white space around it.

        Raises:
            ConfigError: it cannot be read, is larger than 4096 bytes, or holds too little.
            ResourceExhaustedError: the process has no free descriptor to read it.
        """
        name = os.fspath(path)
        try:
            with open(name, "rb") as f:
                mode = os.fstat(f.fileno()).st_mode
                raw = f.read(_MAX_SECRET_BYTES + 1)
        except OSError as e:
            raise_if_exhausted(e, f"reading secret_file {name}")
            raise ConfigError(f"secret_file {name}: {e.strerror or e}") from e
        if len(raw) > _MAX_SECRET_BYTES:
            raise ConfigError(f"secret_file {name} is larger than {_MAX_SECRET_BYTES} bytes")
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            logger.warning("secret file %s is open to other users; chmod 600 it", name)
        return cls(raw.strip(), f"secret_file {name}")


@attrs.frozen
class Credentials:
    """What this process proves itself with. Without a secret: that it runs as the same user on the same host.

    >>> Credentials().require_secret("127.0.0.1:7000")
    >>> Credentials().require_secret("192.0.2.1:7000")
    Traceback (most recent call last):
        ...
    kvplug.errors.InsecureAddressError: bad configuration: 192.0.2.1:7000 can be reached from other hosts, ...
    """

    secret: Secret | None = None
    """Shared by all processes that may connect; ``None``: there is none."""
    tls: TlsFiles | None = None
    """For connections over TCP. Unix sockets never leave the host, and use no TLS."""

    @classmethod
    def for_host(
        cls,
        host: str,
        *,
        secret_file: str | os.PathLike[str] | None = None,
        tls: TlsFiles | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Credentials:
        """The credentials of a process that listens at or dials ``host`` (or ``unix:@name``).

        The file goes before ``KVPLUG_SECRET``.

        Raises:
            ConfigError: the secret cannot be read, or a TLS file cannot be used.
            InsecureAddressError: other hosts can reach ``host`` and there is no secret.
        """
        secret = Secret.from_file(secret_file) if secret_file else Secret.from_env(environ)
        credentials = cls(secret, tls)
        if tls is not None:
            tls.for_listener()  # a file that cannot be used is a fault now, not at the first connection
        credentials.require_secret(UnixAddress("") if host.startswith("unix:") else TcpAddress(host, 0))
        return credentials

    def require_secret(self, address: Address | str, resolved: Sequence[Resolved] | None = None) -> None:
        """Refuse an address that other hosts can reach, unless there is a secret.

        ``resolved`` is what the address stands for, where the caller has looked it up already.

        Raises:
            InsecureAddressError: as said, and what to do about it.
        """
        if isinstance(address, str):
            address = parse_address(address)
        if self.secret is not None or isinstance(address, UnixAddress):
            return
        if resolved is None:
            safe = is_loopback(address.host)
        else:
            safe = bool(resolved) and all(r.loopback for r in resolved)
        if not safe:
            where = address if address.port else address.host
            raise InsecureAddressError(
                f"{where} can be reached from other hosts, and there is no secret: set {SECRET_VARIABLE}"
                f" or secret_file on both sides ({_HOW}), or use 127.0.0.1 or unix:@name on one host"
            )
