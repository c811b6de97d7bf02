"""TLS for kvplug's TCP connections: version 1.3 only, and both ends present a certificate.

A deployment has its own certificate authority (``tls_ca``), which signs certificates for its processes only.
The authority must have signed the other end's certificate, and a listener's certificate must also name the
dialled host. TLS encrypts; a secret is still proved over the TLS session, and the proof is bound to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

import attrs

from kvplug.errors import AuthenticationError, ConfigError, PeerGoneError, ResourceExhaustedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork, close_sockets, no_fork

logger = logging.getLogger(__name__)

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_EXPLICIT, _UTC_TIME = 0xA0, 0x17  # tags of DER
_OTHER_NAME = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


@attrs.frozen(kw_only=True)
class TlsFiles:
    """PEM files: this process's certificate with its chain, its private key, and the authority's certificate.

    Changed files are read again, so renewed certificates are used without a restart.
    """

    cert: str
    key: str
    ca: str
    check_host: bool = True
    """Whether a listener's certificate must name the dialled host."""

    def for_listener(self) -> ssl.SSLContext:
        """Return a listener's context. Raises ResourceExhaustedError, or ConfigError with the config key of a
        file that cannot be read or used."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def for_dialler(self) -> ssl.SSLContext:
        """Return a dialler's context. Raises as :meth:`for_listener`."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.check_host
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # A connection that ends without TLS's close_notify is treated as an ordinary end, after which this
        # side may still send. Frames have lengths, so a truncated frame is noticed.
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # each connection has its own session, to which the proof is bound
        for key, path in (("tls_cert", self.cert), ("tls_key", self.key), ("tls_ca", self.ca)):
            with _reading(f"{key} {path}"), open(path, "rb"):
                pass
        with _reading(f"tls_cert {self.cert} and tls_key {self.key}", "not a certificate and its key in PEM"):
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        with _reading(f"tls_ca {self.ca}", "not a certificate in PEM"):
            context.load_verify_locations(self.ca)
        return context


@contextlib.contextmanager
def _reading(what: str, fault: str = "") -> Iterator[None]:
    """Map errors of reading ``what`` to ConfigError. ``fault`` explains why the TLS library refuses it."""
    try:
        with no_fork:
            yield
    except (OSError, ValueError) as e:
        NamedExhaustion.check(e, f"reading {what}")
        why = f"{fault} ({reason_of(e)})" if fault else getattr(e, "strerror", None) or e
        raise ConfigError(f"{what}: {why}") from e


class ListenerTls:
    """The TLS context of a listener, recreated when a file has changed. For one thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises as :meth:`TlsFiles.for_listener`."""
        self._files = files
        self._seen = self._stamps()
        self._context = files.for_listener()

    @property
    def context(self) -> ssl.SSLContext:
        stamps = self._stamps()
        if stamps != self._seen:
            try:
                self._context = self._files.for_listener()
            except (ResourceExhaustedError, ConfigError) as e:
                logger.warning("the changed TLS files cannot be used yet: %s", e)
                if isinstance(e, ResourceExhaustedError):
                    return self._context  # the next connection reads them again
                # perhaps only some files are replaced so far; then others will change
            self._seen = stamps
        return self._context

    def _stamps(self) -> list[tuple[int, int]]:
        stamps = []
        for path in (self._files.cert, self._files.key, self._files.ca):
            try:
                found = os.stat(path)
                stamps.append((found.st_mtime_ns, found.st_ino))
            except OSError:
                stamps.append((0, 0))
        return stamps


def _no_password() -> str:
    raise ValueError("the key is encrypted, and kvplug does not have its password")


def binding_of(sock: ssl.SSLSocket) -> bytes:
    """Return a value that both ends of one TLS session share, and no other session has.

    It is a hash of the client's Finished message, which is a MAC over the whole handshake.
    The two ends of a relayed connection have different values.

    Raises:
        AuthenticationError: this Python's TLS library does not provide it.
    """
    finished = sock.get_channel_binding("tls-unique")
    if not finished or sock.version() != "TLSv1.3":
        raise AuthenticationError(
            f"{ssl.OPENSSL_VERSION} does not provide the channel binding of a TLS session"
        )
    return hashlib.sha256(b"kvplug tls 1" + finished).digest()


def wrap_dialled(sock: socket.socket, files: TlsFiles, host: str) -> ssl.SSLSocket:
    """Start TLS over a connected socket to ``host``. The result owns the descriptor and has the same timeout.

    Raises:
        ConfigError: a file cannot be used.
        ssl.SSLError: the listener's certificate is not accepted, or the listener does not speak TLS or hung
            up. See :func:`refusal_of`.
        TimeoutError: the builtin exception, at the socket's timeout.
    """
    context = files.for_dialler()
    with no_fork:
        wrapped = context.wrap_socket(
            sock, server_hostname=host.partition("%")[0], do_handshake_on_connect=False
        )
        close_after_fork(wrapped)
    try:
        wrapped.do_handshake()
    except BaseException:
        close_sockets(wrapped)
        raise
    return wrapped


def refusal_of(error: ssl.SSLError, where: str) -> AuthenticationError | PeerGoneError:
    """Convert an error of the TLS library at the dialling end. ``where`` names the listener."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why, is_name = error.verify_message.rstrip("."), error.verify_code in _OTHER_NAME
        return AuthenticationError(
            f"the certificate of {where} is not accepted: {why}; check tls_ca here and tls_cert there"
            + (", which must name that host" if is_name else ""),
            code="certificate name" if is_name else "certificate",
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return PeerGoneError(
            f"{where} hung up during the TLS handshake: it is shutting down, overloaded, or does not use TLS",
            code="hung up",
        )
    reason = reason_of(error)
    if "alert" in reason:
        return AuthenticationError(
            f"{where} refused our certificate ({reason}); check tls_cert here and tls_ca there",
            code="certificate",
        )
    return AuthenticationError(
        f"the server at {where} does not speak TLS 1.3 as this end does ({reason}); set tls_cert, tls_key"
        " and tls_ca on both ends, or on neither",
        code="tls",
    )


def reason_of(error: Exception) -> str:
    """Return the TLS library's own description of an error, in lower case."""
    reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
    return str(reason).replace("_", " ").lower()


def validity_of(path: str) -> list[tuple[float, float]]:
    """Return when each certificate in a PEM file becomes valid and expires, in seconds since 1970 (RFC 5280,
    4.1).

    The ``ssl`` module shows these times only for certificates of authorities and of accepted peers.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        return [_validity(ssl.PEM_cert_to_DER_cert(each)) for each in _CERTIFICATE.findall(file.read())]


def _validity(der: bytes) -> tuple[float, float]:
    ((_, certificate),) = _elements(der)
    _, to_be_signed = next(_elements(certificate))
    fields = [content for tag, content in _elements(to_be_signed) if tag != _EXPLICIT]  # without the version
    begins, ends = (_seconds(tag, content.decode()) for tag, content in _elements(fields[3]))
    return begins, ends


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and content of each element of a DER value."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:  # the number of bytes of the size
            size, at = int.from_bytes(der[at : at + (size & 0x7F)], "big"), at + (size & 0x7F)
        yield tag, der[at : at + size]
        at += size


def _seconds(tag: int, text: str) -> float:
    if tag == _UTC_TIME:  # the year has two digits
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
