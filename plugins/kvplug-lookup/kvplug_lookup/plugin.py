"""Entry point: what this distribution offers."""

from __future__ import annotations

from kvplug import ConnectorSpec, Kind, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind=Kind.LOOKUP_BUFFER,
            name="simple",
            factory="kvplug_lookup.endpoint:SimpleEndpoint",
            options="kvplug_lookup.options:SimpleOptions",
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
