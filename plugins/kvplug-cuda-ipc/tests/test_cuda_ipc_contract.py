"""The pipe "cuda-ipc" is judged by the conformance kit, over the fake CUDA runtime and host memory."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvplug.transport import PipeEndpoint
from kvplug_cuda_ipc.options import CudaIpcPipeOptions
from kvplug_testing import PipeContract


class TestCudaIpcPipe(PipeContract):
    options_class = CudaIpcPipeOptions
    options: ClassVar[dict[str, Any]] = {"staging_bytes": 4 << 20, "piece_bytes": 256 << 10}
    lies = 15
    caller: Any = None
    """The caller's stream."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _over_the_fake(cls, fake_path: str) -> None:
        cls.options = {**cls.options, "library": fake_path}

    def make_endpoint(self, context: PipeEndpoint.Context) -> PipeEndpoint:
        from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint
        from kvplug_lab.gpu.cuda_ipc import HostDevice

        return CudaIpcEndpoint(context, HostDevice(context.options.library, self.caller))

    def late_kernels(self) -> Any:
        from device_pipes import LateKernelsOfAFake  # which no process of the suite's has

        kernels = LateKernelsOfAFake(self.options["library"])
        self.later(kernels.caller.close)
        self.caller = kernels.caller
        return kernels

    def import_all(self) -> None:
        import kvplug_lab.gpu.cuda_ipc  # noqa: F401

        super().import_all()


@pytest.mark.variant
class TestCudaIpcPipeWithMuchMemory(TestCudaIpcPipe):
    options: ClassVar[dict[str, Any]] = {}
    beyond_limit_bytes = 64 << 20
