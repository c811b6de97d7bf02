"""The entry point: what this distribution offers, as strings. ``kvplug list`` imports this module."""

from __future__ import annotations

from kvplug.transport import Capabilities, Cost, Kind, TransportSpec, hookimpl

KVPLUG_API = (1, 0)
"""The plugin API this was written for. Read without importing anything, so it must be a literal."""


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind=Kind.PIPE,
            name="kept-transport",
            factory="kvplug_kept_transport.pipe:KeptEndpoint",
            options="kvplug_kept_transport.light:KeptOptions",
            probe="kvplug_kept_transport.light:describe",
            summary="CPU tensors between two processes of one host, over one socket",
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=False,
                receive_into=True,
                cost=Cost(latency_us=100.0, gb_per_s=0.5),
            ),
        )
    ]
