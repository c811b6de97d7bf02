"""The plugin's entry point: registers its lookup buffer, connectors and command."""

from __future__ import annotations

from kvplug.engine import CommandSpec, ConnectorSpec
from kvplug.transport import Capabilities, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind="lookup_buffer",
            name="simple",
            factory="kvplug_lookup.buffer.endpoint:SimpleEndpoint",
            options="kvplug_lookup.buffer.options:SimpleOptions",
            # It moves nothing between hosts or devices itself, so its reach is that of its pipes. An insert
            # copies the entry once. Finding an entry takes some tens of microseconds.
            capabilities=Capabilities(
                devices={"cpu"}, cross_host=True, cost=Capabilities.Cost(latency_us=50.0, gb_per_s=2.0)
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
            moves_pages=True,
            summary="Saves KV page by page into stores; loads the longest prefix that a store or a peer has",
        ),
        ConnectorSpec(
            name="simple",
            factory="kvplug_lookup.simple.scheduler:SimpleScheduler",
            worker_factory="kvplug_lookup.simple.worker:SimpleWorker",
            options="kvplug_lookup.simple.options:SimpleConnectorOptions",
            uses_lookup_buffer=True,
            summary="Whole prompts in a lookup buffer: prefill inserts them, decode reads shared prefixes",
        ),
    ]


@hookimpl
def kvplug_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="events",
            target="kvplug_lookup.events_command:events",
            summary="Print events about cached blocks that an engine publishes",
        )
    ]
