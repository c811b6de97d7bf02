"""The entry point: every hook of plugin API 1.0."""

from kvplug.engine import CommandSpec, ConnectorSpec, SinkSpec
from kvplug.transport import Capabilities, Cost, Kind, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports():
    return [
        TransportSpec(
            kind=Kind.PIPE,
            name="kept-pipe",
            factory="kvplug_kept.pipe:Endpoint",
            options="kvplug_kept.light:PipeOptions",
            probe="kvplug_kept.light:describe",
            summary="One socket, and whoever calls reads and writes it",
            protocol=1,
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=False,
                authenticated=True,
                receive_into=False,
                full_duplex=True,
                max_dims=64,
                cost=Cost(latency_us=200.0, gb_per_s=0.2),
            ),
        )
    ]


@hookimpl
def kvplug_connectors():
    return [
        ConnectorSpec(
            name="kept-connector",
            factory="kvplug_kept.connector:Scheduler",
            worker_factory="kvplug_kept.connector:Worker",
            options="kvplug_kept.light:ConnectorOptions",
            summary="Loads nothing and saves nothing, in the right order",
        )
    ]


@hookimpl
def kvplug_sinks():
    return [
        SinkSpec(
            name="kept-sink",
            factory="kvplug_kept.sink:make",
            options="kvplug_kept.light:SinkOptions",
            summary="A line in a file for each snapshot",
        )
    ]


@hookimpl
def kvplug_commands():
    return [CommandSpec(name="kept", target="kvplug_kept.command:kept", summary="Say what is kept")]
