"""Entry point: what this distribution offers."""

from __future__ import annotations

from kvplug.engine import ConnectorSpec
from kvplug.transport import Capabilities, Cost, Kind, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind=Kind.LOOKUP_BUFFER,
            name="simple",
            factory="kvplug_lookup.endpoint:SimpleEndpoint",
            options="kvplug_lookup.options:SimpleOptions",
            # It moves nothing between hosts or devices itself: it has the reach of the pipes it is given. An
            # entry is copied once on its way in, and found in some tens of microseconds.
            capabilities=Capabilities(
                devices={"cpu"}, cross_host=True, cost=Cost(latency_us=50.0, gb_per_s=2.0)
            ),
            summary="KV entries in this process's memory, found by exact token prefixes",
        )
    ]


@hookimpl
def kvplug_connectors() -> list[ConnectorSpec]:
    return [
        ConnectorSpec(
            name="lookup",
            factory="kvplug_lookup.connector.scheduler:LookupScheduler",
            worker_factory="kvplug_lookup.connector.worker:LookupWorker",
            options="kvplug_lookup.connector.options:LookupConnectorOptions",
            summary="Prefill saves whole prompts into a lookup buffer; decode loads the longest prefix held",
        )
    ]
