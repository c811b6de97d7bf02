"""The configured host as an address that can be bound: it may be the name of a network interface."""

from __future__ import annotations

import ipaddress
import socket
import struct

from kvplug import ConfigError

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_LOOPBACK = "127.0.0.1"


def address_of(host: str) -> str:
    """``host`` itself, or the IPv4 address of the interface it names; loopback for a Unix socket.

    Raises:
        ConfigError: the interface has no IPv4 address.
    """
    if host.startswith("unix:"):
        return _LOOPBACK
    if host not in {name for _, name in socket.if_nameindex()}:
        return host
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", host.encode()))
        except OSError as e:
            raise ConfigError(
                f"the interface {host!r} has no IPv4 address ({e.strerror}); give an address as host"
            ) from e
    return str(ipaddress.IPv4Address(answer[20:24]))
