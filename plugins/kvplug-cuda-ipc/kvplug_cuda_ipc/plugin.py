"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import Capabilities, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind="pipe",
            name="cuda-ipc",
            factory="kvplug_cuda_ipc.pipe.endpoint:CudaIpcEndpoint",
            options="kvplug_cuda_ipc.options:CudaIpcPipeOptions",
            probe="kvplug_cuda_ipc.probe:describe",
            summary="CUDA tensors between processes of one host, through device memory that both have mapped",
            capabilities=Capabilities(
                devices={"cuda"},
                receive_into=True,
                full_duplex=True,
                max_dims=64,
                cost=Capabilities.Cost(latency_us=150.0, gb_per_s=100.0),
            ),
        )
    ]
