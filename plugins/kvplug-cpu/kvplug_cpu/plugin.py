"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import Capabilities, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind="pipe",
            name="cpu",
            factory="kvplug_cpu.endpoint:CpuEndpoint",
            options="kvplug_cpu.options:CpuOptions",
            probe="kvplug_cpu.probe:describe",
            summary="CPU tensors over abstract Unix sockets on one host, and over TCP",
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=True,
                authenticated=True,
                receive_into=True,
                full_duplex=True,
                max_dims=64,
                cost=Capabilities.Cost(latency_us=40.0, gb_per_s=6.0),
            ),
        ),
        TransportSpec(
            kind="communicator",
            name="cpu",
            factory="kvplug_cpu.communicator:CpuCommunicator",
            probe="kvplug_cpu.probe:describe",
            summary="Collectives of CPU tensors over pipes, with deadlines",
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=True,
                authenticated=True,
                cost=Capabilities.Cost(latency_us=400.0, gb_per_s=1.0),
            ),
        ),
    ]
