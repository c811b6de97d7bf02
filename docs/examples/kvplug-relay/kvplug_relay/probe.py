"""Whether the queue can work on this host. ``kvplug list`` imports this module: no torch here."""

from __future__ import annotations

from kvplug.transport import PeerIdentity, Probe


def describe() -> Probe:
    """Abstract Unix sockets reach what runs under the same kernel in the same network namespace."""
    domain = PeerIdentity.of_this_process().domain
    if domain == "-":
        return Probe(viable=False, reason="works on Linux only, where /proc is mounted")
    return Probe(domain=domain)
