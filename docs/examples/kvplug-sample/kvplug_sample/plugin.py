"""The entry point: what this distribution offers, as strings. ``kvplug list`` imports this module."""

from __future__ import annotations

import os

from kvplug.transport import Capabilities, TransportSpec, hookimpl

KVPLUG_API = (1, 0)
"""The plugin API this was written for. Read without importing anything, so it must be a literal."""


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    # A transport of yours would state what was measured. The variable lets you watch "auto" change its mind.
    claimed = float(os.environ.get("SAMPLE_PIPE_GB_PER_S", "0.5"))
    return [
        TransportSpec(
            kind="pipe",
            name="sample",
            factory="kvplug_sample.pipe:SampleEndpoint",
            options="kvplug_sample.options:SampleOptions",
            probe="kvplug_sample.probe:describe",
            summary="CPU tensors between two processes of one host, over one socket",
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=False,
                receive_into=True,
                cost=Capabilities.Cost(latency_us=100.0, gb_per_s=claimed),
            ),
        )
    ]
