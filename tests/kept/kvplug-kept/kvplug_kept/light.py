"""Options of each sort, and the probe."""

import os
from pathlib import Path
from typing import Literal

import attrs

from kvplug.transport import Probe, option


@attrs.frozen(kw_only=True)
class PipeOptions:
    """Options of the pipe "kept-pipe"."""

    greeting: Literal["loud", "quiet"] = option("quiet", help="How a connection begins.")
    chunk_bytes: int = option(
        1 << 20, help="Bytes to write at once.", unit="bytes", at_least=1, at_most=1 << 30
    )
    poll_s: float = option(0.05, help="Between two looks.", unit="seconds", above=0)


@attrs.frozen(kw_only=True)
class ConnectorOptions:
    """Options of the connector "kept-connector"."""

    folder: str | None = option(None, help="Nothing is written there.")


@attrs.frozen(kw_only=True)
class SinkOptions:
    """Options of the sink "kept-sink"."""

    path: str = option(help="Of the file.")


def describe() -> Probe:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError as e:
        return Probe(viable=False, reason=f"no /proc: {e}")
    return Probe(domain=f"{boot_id} {namespace}")
