"""The core's own plugin. It is found, listed and disabled through its entry point like any other."""

from __future__ import annotations

from kvplug.transport.hookspecs import hookimpl
from kvplug.transport.spec import SinkSpec

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_sinks() -> list[SinkSpec]:
    return [
        SinkSpec(
            name="log",
            factory="kvplug.metrics.sinks:LogSink",
            summary="Every ten seconds a line for each kind of operation, in the log at INFO",
        ),
        SinkSpec(
            name="prometheus",
            factory="kvplug.metrics.prometheus:ConfiguredPrometheusSink",
            summary="Counters in prometheus_client's global registry, with labels that name their source",
        ),
    ]
