"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import Capabilities, StoreSpec, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="nixl",
            factory="kvplug_nixl.store.store:make_store",
            options="kvplug_nixl.store.options:NixlStoreOptions",
            probe="kvplug_nixl.probe:probe",
            summary="Pages in files or in S3, which NIXL reads and writes",
            persistent=True,
            cross_host=True,
        )
    ]


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind="pipe",
            name="nixl",
            factory="kvplug_nixl.pipe.endpoint:NixlEndpoint",
            options="kvplug_nixl.pipe.options:NixlPipeOptions",
            probe="kvplug_nixl.probe:probe_pipe",
            summary="CPU and CUDA tensors over what UCX finds: shared memory, RDMA, TCP; read where they are",
            capabilities=Capabilities(
                devices={"cpu", "cuda"},
                cross_host=True,
                authenticated=False,
                receive_into=True,
                full_duplex=True,
                max_dims=64,
                cost=Capabilities.Cost(latency_us=250.0, gb_per_s=5.0),
            ),
        )
    ]
