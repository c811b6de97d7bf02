"""Binding a listener's socket to an address of this host, and the contact that others dial."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket

from kvplug.config.addresses import Address, ListenerContact, TcpAddress, UnixAddress, parse_address
from kvplug.errors import AddressInUseError, ConfigError, PeerGoneError, TransportError
from kvplug.net.trust.addresses import HAS_ABSTRACT_SOCKETS, Resolved, generated_name, resolve
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.peercred import owner_of
from kvplug.net.trust.socket_path import bind_path


def bound(address: str | Address, credentials: Credentials) -> tuple[socket.socket, ListenerContact]:
    """A socket that is bound and does not listen yet, and its contact, with a token where one is needed.

    Raises as :meth:`~kvplug.net.trust.listener.Listener.open`.
    """
    if isinstance(address, str):
        address = parse_address(address)
    if isinstance(address, UnixAddress) and address.is_path:
        return _bind_path(address)
    if isinstance(address, UnixAddress) and not HAS_ABSTRACT_SOCKETS:
        if address.name:
            raise ConfigError(
                f"{address} cannot be used: there are no abstract Unix sockets here; use 127.0.0.1:port"
            )
        address = TcpAddress("127.0.0.1", 0)
    if isinstance(address, UnixAddress):
        return _bind_unix(UnixAddress(address.name or generated_name()))
    try:
        resolved = resolve(address)
    except PeerGoneError as e:
        raise ConfigError(f"cannot listen at {address}: {e}") from e
    credentials.require_secret(address, resolved)
    return _bind_tcp(address, resolved[0], with_token=credentials.secret is None)


def cannot_bind(address: Address, e: OSError) -> ConfigError | AddressInUseError | TransportError:
    """Map the error of a failed call for a socket at this address."""
    if e.errno == errno.EADDRINUSE:
        owner = owner_of(address)
        by = f" by {owner}" if owner else ""
        return AddressInUseError(f"{address} is in use{by}; stop it or choose another address")
    if e.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"cannot listen at {address}: this host has no such address")
    if e.errno in (errno.ENOENT, errno.ENOTDIR) and isinstance(address, UnixAddress):
        return ConfigError(f"cannot listen at {address}: there is no such folder")
    return TransportError(f"cannot listen at {address}: {e.strerror or e}")


def _bind_unix(address: UnixAddress) -> tuple[socket.socket, ListenerContact]:
    sock = _new_socket(socket.AF_UNIX, address)
    try:
        sock.bind(address.sockaddr)
    except OSError as e:
        sock.close()
        raise cannot_bind(address, e) from e
    return sock, ListenerContact(address)


def _bind_path(address: UnixAddress) -> tuple[socket.socket, ListenerContact]:
    sock = _new_socket(socket.AF_UNIX, address)
    try:
        bind_path(sock, address.name)
    except OSError as e:
        sock.close()
        raise cannot_bind(address, e) from e
    return sock, ListenerContact(address)


def _bind_tcp(
    address: TcpAddress, end: Resolved, *, with_token: bool
) -> tuple[socket.socket, ListenerContact]:
    sock = _new_socket(end.family, address)
    try:
        # Only lets a port be used again whose old connections linger; two listeners still collide.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(end.sockaddr)
    except OSError as e:
        sock.close()
        raise cannot_bind(address, e) from e
    host, port, *more = sock.getsockname()
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = _own_address(end.family)
    elif len(more) == 2 and more[1] and "%" not in host:
        # By the interface's name, which other hosts' interfaces to that link have more often than its number.
        host = f"{host}%{socket.if_indextoname(more[1])}"
    token = secrets.token_urlsafe(24) if with_token else ""
    return sock, ListenerContact(TcpAddress(host, port), token)


def _new_socket(family: int, address: Address) -> socket.socket:
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:  # no descriptor is left, or the system has no such family
        raise cannot_bind(address, e) from e


def _own_address(family: int) -> str:
    """An address other hosts can dial, for a listener on every interface: that of the default route."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only makes the kernel choose a source.
        probe.connect(("192.0.2.1", 9) if family == socket.AF_INET else ("2001:db8::1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()
