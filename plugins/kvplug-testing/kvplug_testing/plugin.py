"""The entry point of kvplug-testing: imports nothing heavy."""

from __future__ import annotations

from kvplug.engine import CommandSpec, ConnectorSpec
from kvplug.transport import Capabilities, Cost, Kind, StoreSpec, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind=Kind.PIPE,
            name="memory",
            factory="kvplug_testing.memory.pipe:MemoryEndpoint",
            options="kvplug_testing.memory.options:MemoryPipeOptions",
            probe="kvplug_testing.memory.options:describe",
            summary="For tests: both ends in one process, nothing but Python",
            capabilities=Capabilities(cost=Cost(latency_us=10.0, gb_per_s=5.0)),
            for_tests=True,
        ),
        TransportSpec(
            kind=Kind.QUEUE,
            name="memory",
            factory="kvplug_testing.memory.queue:MemoryQueueEndpoint",
            probe="kvplug_testing.memory.options:describe",
            summary="For tests: writer and readers in one process, nothing but Python",
            capabilities=Capabilities(cost=Cost(latency_us=10.0, gb_per_s=5.0)),
            for_tests=True,
        ),
        TransportSpec(
            kind=Kind.COMMUNICATOR,
            name="memory",
            factory="kvplug_testing.memory.communicator:MemoryCommunicator",
            probe="kvplug_testing.memory.options:describe",
            summary="For tests: the ranks are threads of one process, nothing but Python",
            capabilities=Capabilities(cost=Cost(latency_us=100.0, gb_per_s=2.0)),
            for_tests=True,
        ),
        TransportSpec(
            kind=Kind.LOOKUP_BUFFER,
            name="memory",
            factory="kvplug_testing.memory.lookup:MemoryLookupEndpoint",
            probe="kvplug_testing.memory.options:describe",
            summary="For tests: entries in this process, reached within it, nothing but Python",
            capabilities=Capabilities(cost=Cost(latency_us=100.0, gb_per_s=2.0)),
            for_tests=True,
        ),
    ]


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="memory",
            factory="kvplug_testing.memory.store:MemoryStore",
            client="kvplug_testing.memory.store:RemoteMemoryStore",
            options="kvplug_testing.memory.options:MemoryStoreOptions",
            summary="For tests: pages in this process, nothing but Python",
            for_tests=True,
        ),
    ]


@hookimpl
def kvplug_connectors() -> list[ConnectorSpec]:
    return [
        ConnectorSpec(
            name="memory",
            factory="kvplug_testing.memory.connector:MemoryScheduler",
            worker_factory="kvplug_testing.memory.connector:MemoryWorker",
            options="kvplug_testing.memory.options:MemoryConnectorOptions",
            summary="For tests: engines of one process load what other engines of it have computed",
            for_tests=True,
        ),
    ]


@hookimpl
def kvplug_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="check",
            target="kvplug_testing.check_command:check",
            summary="Load everything of a plugin, and say all that is wrong with it",
        )
    ]
