"""What the core itself offers, through its own entry point: found, listed and disabled like any plugin."""

from __future__ import annotations

from kvplug.transport.capabilities import Capabilities, Cost
from kvplug.transport.hookspecs import hookimpl
from kvplug.transport.spec import ConnectorSpec, Kind, SinkSpec, TransportSpec

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind=Kind.PIPE,
            name="memory",
            factory="kvplug.testing.memory.pipe:MemoryEndpoint",
            options="kvplug.testing.memory.options:MemoryPipeOptions",
            probe="kvplug.testing.memory.options:describe",
            summary="For tests: both ends in one process, nothing but Python",
            capabilities=Capabilities(cost=Cost(latency_us=10.0, gb_per_s=5.0)),
            for_tests=True,
        ),
        TransportSpec(
            kind=Kind.PIPE,
            name="faulty",
            factory="kvplug.testing.faults.transport:faulty",
            options="kvplug.testing.faults.options:FaultyOptions",
            summary="Another pipe, to which happens what a plan of faults says",
            for_tests=True,
            wraps=True,
        ),
        TransportSpec(
            kind=Kind.QUEUE,
            name="memory",
            factory="kvplug.testing.memory.queue:MemoryQueueEndpoint",
            probe="kvplug.testing.memory.options:describe",
            summary="For tests: writer and readers in one process, nothing but Python",
            capabilities=Capabilities(cost=Cost(latency_us=10.0, gb_per_s=5.0)),
            for_tests=True,
        ),
        TransportSpec(
            kind=Kind.QUEUE,
            name="faulty",
            factory="kvplug.testing.faults.queue:faulty",
            options="kvplug.testing.faults.options:FaultyOptions",
            summary="Another message queue, to whose values happens what a plan of faults says",
            for_tests=True,
            wraps=True,
        ),
        TransportSpec(
            kind=Kind.COMMUNICATOR,
            name="memory",
            factory="kvplug.testing.memory.communicator:MemoryCommunicator",
            probe="kvplug.testing.memory.options:describe",
            summary="For tests: the ranks are threads of one process, nothing but Python",
            capabilities=Capabilities(cost=Cost(latency_us=100.0, gb_per_s=2.0)),
            for_tests=True,
        ),
        TransportSpec(
            kind=Kind.LOOKUP_BUFFER,
            name="memory",
            factory="kvplug.testing.memory.lookup:MemoryLookupEndpoint",
            probe="kvplug.testing.memory.options:describe",
            summary="For tests: entries in this process, reached within it, nothing but Python",
            capabilities=Capabilities(cost=Cost(latency_us=100.0, gb_per_s=2.0)),
            for_tests=True,
        ),
    ]


@hookimpl
def kvplug_connectors() -> list[ConnectorSpec]:
    return [
        ConnectorSpec(
            name="memory",
            factory="kvplug.testing.memory.connector:MemoryScheduler",
            worker_factory="kvplug.testing.memory.connector:MemoryWorker",
            options="kvplug.testing.memory.options:MemoryConnectorOptions",
            summary="For tests: engines of one process load what others of it have computed",
            for_tests=True,
        ),
    ]


@hookimpl
def kvplug_sinks() -> list[SinkSpec]:
    return [
        SinkSpec(
            name="log",
            factory="kvplug.metrics.sinks:configured_log_sink",
            summary="One line for each operation, to the logger kvplug.metrics.sinks at INFO",
        ),
        SinkSpec(
            name="prometheus",
            factory="kvplug.metrics.prometheus:ConfiguredPrometheusSink",
            summary="Counters in prometheus_client's global registry, labelled connector, side and role",
        ),
    ]
