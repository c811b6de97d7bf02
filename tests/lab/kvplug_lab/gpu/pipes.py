"""The pipes "pynccl" and "cuda-ipc" under their own names, over the fake libraries and CPU memory.

For tests of what chooses pipes by name: connectors, and engines.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvplug import Registry
from kvplug.transport import PipeEndpoint, TransportSpec, hookimpl


def pynccl(context: PipeEndpoint.Context) -> PipeEndpoint:
    """The factory of "pynccl"."""
    from kvplug_lab.gpu.pynccl import HostDevice
    from kvplug_pynccl.pipe.endpoint import PyncclEndpoint

    return PyncclEndpoint(context, HostDevice(context.options.library))


def cuda_ipc(context: PipeEndpoint.Context) -> PipeEndpoint:
    """The factory of "cuda-ipc"."""
    from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint
    from kvplug_lab.gpu.cuda_ipc import HostDevice

    return CudaIpcEndpoint(context, HostDevice(context.options.library))


class _Pipes:
    @hookimpl
    def kvplug_transports(self) -> list[TransportSpec]:
        from kvplug_cuda_ipc import plugin as of_cuda_ipc
        from kvplug_pynccl import plugin as of_pynccl

        made: list[TransportSpec] = []
        for plugin, factory in ((of_pynccl, "pynccl"), (of_cuda_ipc, "cuda_ipc")):
            (spec,) = [spec for spec in plugin.kvplug_transports() if spec.kind == "pipe"]
            able: Any = attrs.evolve(spec.capabilities, devices={"cpu"})
            made.append(
                attrs.evolve(spec, factory=f"kvplug_lab.gpu.pipes:{factory}", capabilities=able, probe=None)
            )
        return made


def registry(*disabled: str) -> Registry:
    """The installed plugins, these pipes in place of the real ones. ``disabled``: plugins to leave out."""
    found = Registry.from_env({"KVPLUG_DISABLE_PLUGINS": ",".join(["pynccl", "cuda-ipc", *disabled])})
    found.register(_Pipes(), name="fake-gpu")
    return found
