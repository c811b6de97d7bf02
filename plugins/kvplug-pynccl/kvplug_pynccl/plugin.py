"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import Capabilities, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind="pipe",
            name="pynccl",
            factory="kvplug_pynccl.pipe.endpoint:PyncclEndpoint",
            options="kvplug_pynccl.options:PyncclPipeOptions",
            probe="kvplug_pynccl.probe:describe",
            protocol=2,
            summary="CUDA tensors over NCCL, between GPUs of one host or of several",
            capabilities=Capabilities(
                devices={"cuda"},
                cross_host=True,
                authenticated=False,
                receive_into=True,
                full_duplex=True,
                max_dims=64,
                cost=Capabilities.Cost(latency_us=200.0, gb_per_s=20.0),
            ),
        ),
        TransportSpec(
            kind="communicator",
            name="pynccl",
            factory="kvplug_pynccl.communicator.communicator:PyncclCommunicator",
            options="kvplug_pynccl.options:PyncclCommunicatorOptions",
            probe="kvplug_pynccl.probe:describe",
            summary="Collectives of CUDA tensors over NCCL, with deadlines",
            capabilities=Capabilities(
                devices={"cuda"},
                cross_host=True,
                authenticated=False,  # NCCL's connections; the side channels are
                cost=Capabilities.Cost(latency_us=50.0, gb_per_s=20.0),
            ),
        ),
    ]
