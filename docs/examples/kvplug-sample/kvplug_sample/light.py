"""Options and probe: everything ``kvplug list`` needs beside the plugin's own module. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from kvplug.transport import Probe, option


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
    """Abstract Unix sockets reach what runs under the same kernel in the same network namespace."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError as e:
        return Probe(viable=False, reason=f"works on Linux only, where /proc is mounted: {e}")
    return Probe(domain=f"{boot_id} {namespace}")
