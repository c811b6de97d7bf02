"""Options and probe: everything ``kvplug list`` needs beside the plugin's own module. No torch here."""

from __future__ import annotations

import attrs

from kvplug.transport import PeerIdentity, Probe, option


@attrs.frozen(kw_only=True)
class SampleOptions:
    """Options of the pipe "sample"."""

    max_in_flight_bytes: int = option(
        default=64 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="Unsent bytes that send_tensor queues before it blocks. One larger message passes alone.",
    )


def describe() -> Probe:
    """Return the domain: an abstract Unix socket reaches processes of one kernel and network namespace."""
    domain = PeerIdentity.of_this_process().domain
    if domain == "-":
        return Probe(viable=False, reason="works on Linux only, where /proc is mounted")
    return Probe(domain=domain)
