"""The credentials with which a process proves itself, and the credentials that each address requires."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.config.addresses import Address
from kvplug.errors import ConfigError, InsecureAddressError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.trust.challenge import Mode

if TYPE_CHECKING:
    from kvplug.net.trust.tls import TlsFiles

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "KVPLUG_SECRET"  # noqa: S105  (the name of a variable, not a secret)
MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_HOW = "`kvplug config secret FILE` makes one"


class Secret:
    """Bytes that never appear in ``repr``, ``str``, a log or a pickle.

    The client proves itself first, so a listener that has not yet proved itself sees a hash keyed with the
    secret. A short secret could be guessed offline from it, so at least 16 bytes are required.

    >>> secret = Secret("0123456789abcdef")
    >>> secret
    <Secret>
    >>> secret.reveal()
    b'0123456789abcdef'

    Raises:
        ConfigError: the secret is too short. The error names ``source``.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes | str, source: str = "the secret") -> None:
        # An environment variable may contain any bytes; Python shows invalid UTF-8 as lone surrogates.
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
        if len(raw) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{source} has {len(raw)} bytes, but must have at least {MIN_SECRET_BYTES}; {_HOW}"
            )
        self._value = raw

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> Any:
        raise TypeError("a secret cannot be serialised")

    def reveal(self) -> bytes:
        """Return the bytes, for deriving keys."""
        return self._value

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Secret | None:
        """Return the secret in ``KVPLUG_SECRET``, stripped of white space, or ``None`` if the variable is not
        set.

        Raises:
            ConfigError: the secret is too short.
        """
        text = environ.get(SECRET_VARIABLE, "").strip()
        return cls(text, SECRET_VARIABLE) if text else None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Secret:
        """Return the secret in the file, stripped of white space.

        Raises:
            ConfigError: the file cannot be read, is larger than 4096 bytes, or contains too short a secret.
            ResourceExhaustedError: the process has no free descriptor to read the file.
        """
        name = os.fspath(path)
        try:
            with open(name, "rb") as f:
                mode = os.fstat(f.fileno()).st_mode
                raw = f.read(_MAX_SECRET_BYTES + 1)
        except OSError as e:
            NamedExhaustion.check(e, f"reading secret_file {name}")
            advice = f"; {_HOW}" if isinstance(e, FileNotFoundError) else ""
            raise ConfigError(f"secret_file {name}: {e.strerror or e}{advice}") from e
        if len(raw) > _MAX_SECRET_BYTES:
            raise ConfigError(f"secret_file {name} is larger than {_MAX_SECRET_BYTES} bytes")
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            logger.warning("secret file %s is open to other users; chmod 600 it", name)
        return cls(raw.strip(), f"secret_file {name}")


@attrs.frozen
class Credentials:
    """The credentials of this process. Without any, it proves only that it runs as the same user on the same
    host.

    >>> from kvplug.transport import Address
    >>> Credentials().mode_at(Address.parse("unix:@kvplug"))
    <Mode.SAME_USER: 2>
    >>> Credentials().mode_at(Address.parse("127.0.0.1:7000"))
    Traceback (most recent call last):
        ...
    kvplug.errors.InsecureAddressError: bad configuration: 127.0.0.1:7000 is a TCP address, ...
    """

    secret: Secret | None = None
    """The secret shared by all processes that may connect, or ``None``."""
    tls: TlsFiles | None = None
    """For connections over TCP. Unix sockets never leave the host and do not use TLS."""

    @classmethod
    def load(
        cls,
        *,
        secret_file: str | os.PathLike[str] | None = None,
        tls: TlsFiles | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Credentials:
        """Load the secret from its file, or else from ``KVPLUG_SECRET``, and check the TLS files.

        Raises:
            ConfigError: the secret cannot be read, or a TLS file cannot be used.
        """
        if tls is not None:
            tls.for_listener()  # an unusable file is reported now, not at the first connection
        return cls(Secret.from_file(secret_file) if secret_file else Secret.from_env(environ), tls)

    @property
    def key(self) -> bytes:
        """The secret as bytes, for deriving keys; empty without a secret."""
        return b"" if self.secret is None else self.secret.reveal()

    def mode_at(self, address: Address, field: str = "") -> Mode:
        """Return how both ends of a connection at ``address`` prove themselves. ``field`` names the address
        in errors.

        Raises:
            InsecureAddressError: it is a TCP address, and neither a secret nor TLS is set.
        """
        if self.secret is not None:
            return Mode.SECRET
        if address.is_unix:
            return Mode.SAME_USER
        if self.tls is not None:
            return Mode.CERTIFICATE
        where = address if address.port else address.host
        raise InsecureAddressError(
            f"{field and field + ': '}{where} is a TCP address, which others can reach too, but neither a"
            f" secret nor TLS is set: set secret_file on both ends to one file ({_HOW}), or"
            f" {SECRET_VARIABLE} to the secret, or tls_cert, tls_key and tls_ca; or use host ="
            ' "unix:@kvplug" on one host'
        )
