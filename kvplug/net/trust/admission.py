"""Decides which connections may try to prove themselves, so that no origin crowds out others."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Sequence

from kvplug.config.addresses import ip_address
from kvplug.net.trust.identity import unix_peer_uid

BURST = 64
PER_SECOND = 16.0
"""How many connections from one origin may fail to prove themselves, at once and per second."""
_MAX_ORIGINS = 1024

_THIS_USER = "this user"
_THIS_HOST = "this host"
"""The origin of TCP loopback connections, whose user the kernel does not show."""
_UNLIMITED = (_THIS_USER, _THIS_HOST)
"""A limit on their failures would shut out this user's own connections."""


def origin_of(sock: socket.socket) -> str:
    """Return a new connection's origin, known from the kernel before any byte arrives: a user of this host,
    or another host."""
    if sock.family == socket.AF_UNIX:
        uid = unix_peer_uid(sock)
        return _THIS_USER if uid == os.geteuid() else f"user {uid} of this host"
    host = ip_address(sock.getpeername()[0])
    if host.is_loopback:
        return _THIS_HOST
    # one host may have all addresses of a /64 network
    return str(ipaddress.ip_network((host, 64), strict=False) if host.version == 6 else host)


def place_to_free(origins: Sequence[str], origin: str, most: int) -> int | None:
    """Return the index of the connection to drop before one from ``origin`` is added, or ``None`` if there is
    room.

    ``origins`` are those of the unproven connections, oldest first; ``most`` is the number of places. If
    ``origin`` has three quarters of the places, its oldest connection is dropped. Otherwise, if all places
    are taken, the oldest connection of the origin with the most connections is dropped.
    """
    count = Counter(origins)
    if count[origin] >= max(1, most * 3 // 4):
        return origins.index(origin)
    if len(origins) >= most:
        return origins.index(count.most_common(1)[0][0])
    return None


class FailureRate:
    """Limits how often connections from one origin may fail to prove themselves. Callers pass the time, and
    hold a lock."""

    def __init__(self) -> None:
        self._forgiven: dict[str, float] = {}
        """By origin: when its failures no longer count."""

    def may_come(self, origin: str, now: float) -> bool:
        """Whether to handle a new connection from ``origin``; false after too many failures."""
        return self._forgiven.get(origin, now) - now <= (BURST - 1) / PER_SECOND

    def failed(self, origin: str, now: float) -> None:
        """Note that a connection from ``origin`` did not prove itself."""
        if origin in _UNLIMITED:
            return
        forgiven = max(now, self._forgiven.pop(origin, now)) + 1 / PER_SECOND
        self._forgiven[origin] = min(forgiven, now + BURST / PER_SECOND)  # now the last to be forgotten
        if len(self._forgiven) > _MAX_ORIGINS:
            del self._forgiven[next(iter(self._forgiven))]
