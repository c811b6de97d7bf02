"""The entry point: what this distribution offers, as strings. ``kvplug list`` imports this module."""

from __future__ import annotations

from kvplug.transport import Capabilities, TransportSpec, hookimpl

KVPLUG_API = (1, 0)
"""The plugin API this was written for. Read without importing anything, so it must be a literal."""


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind="queue",
            name="relay",
            factory="kvplug_relay.queue:RelayEndpoint",
            probe="kvplug_relay.probe:describe",
            summary="Values and chunks to processes of one host, each in memory of its own",
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=False,
                cost=Capabilities.Cost(
                    latency_us=200.0, gb_per_s=0.5
                ),  # "auto" compares it: state what you measured
            ),
        )
    ]
