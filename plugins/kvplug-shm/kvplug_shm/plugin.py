"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import Capabilities, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind="pipe",
            name="shm",
            factory="kvplug_shm.pipe.endpoint:ShmEndpoint",
            options="kvplug_shm.options:ShmPipeOptions",
            probe="kvplug_shm.probe:describe",
            summary="CPU tensors through a ring in the shared memory of one host",
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=False,
                authenticated=True,
                receive_into=True,
                full_duplex=True,
                max_dims=64,
                cost=Capabilities.Cost(latency_us=10.0, gb_per_s=15.0),
            ),
        ),
        TransportSpec(
            kind="communicator",
            name="shm",
            factory="kvplug_shm.communicator:ShmCommunicator",
            probe="kvplug_shm.probe:describe",
            summary="Collectives of CPU tensors through the shared memory of one host, with deadlines",
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=False,
                authenticated=True,
                cost=Capabilities.Cost(latency_us=100.0, gb_per_s=2.0),
            ),
        ),
        TransportSpec(
            kind="queue",
            name="shm",
            factory="kvplug_shm.queue.endpoint:ShmQueueEndpoint",
            options="kvplug_shm.options:ShmQueueOptions",
            probe="kvplug_shm.probe:describe",
            summary="One writer, many readers: a ring in the shared memory of one host, TCP to others",
            capabilities=Capabilities(
                devices={"cpu"},
                cross_host=True,
                authenticated=True,
                max_dims=64,
                cost=Capabilities.Cost(latency_us=10.0, gb_per_s=10.0),
            ),
        ),
    ]
