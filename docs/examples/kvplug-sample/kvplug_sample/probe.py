"""Whether the pipe "sample" can work here. ``kvplug list`` imports this module: no torch here."""

from __future__ import annotations

from kvplug.transport import PeerIdentity, Probe


def describe() -> Probe:
    """Return the domain: an abstract Unix socket reaches processes of one kernel and network namespace."""
    domain = PeerIdentity.of_this_process().domain
    if domain == "-":
        return Probe(viable=False, reason="works on Linux only, where /proc is mounted")
    return Probe(domain=domain)
