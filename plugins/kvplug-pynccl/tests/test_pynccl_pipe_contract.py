"""The pipe "pynccl" is judged by the conformance kit, over the fake NCCL and host memory."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvplug.transport import PipeEndpoint
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_testing import PipeContract


class TestPyncclPipe(PipeContract):
    options_class = PyncclPipeOptions
    waivers: ClassVar[dict[str, str]] = {
        "test_a_forked_child_holds_none_of_the_descriptors": (
            "NCCL's own descriptors cannot be closed after a fork; kvplug's are"
        )
    }
    lies = 15
    caller: Any = None
    """The caller's stream."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _over_the_fake(cls, fake_path: str) -> None:
        cls.options = {**cls.options, "library": fake_path}

    def make_endpoint(self, context: PipeEndpoint.Context) -> PipeEndpoint:
        from kvplug_lab.gpu.pynccl import HostDevice
        from kvplug_pynccl.pipe.endpoint import PyncclEndpoint

        return PyncclEndpoint(context, HostDevice(context.options.library, self.caller))

    def late_kernels(self) -> Any:
        from device_pipes import LateKernelsOfAFake  # which no process of the suite's has
        from kvplug_pynccl.pipe.pipe import PyncclPipe

        # Calls with little time left copy with torch, which is not queued on the fake's streams.
        in_place = pytest.MonkeyPatch()
        in_place.setattr(PyncclPipe, "_moves_in_place", lambda pipe, deadline: True)
        self.later(in_place.undo)
        kernels = LateKernelsOfAFake(self.options["library"])
        self.later(kernels.caller.close)
        self.caller = kernels.caller
        return kernels

    def import_all(self) -> None:
        import kvplug_lab.gpu.pynccl  # noqa: F401

        super().import_all()


@pytest.mark.variant
class TestPyncclPipeThatCopiesLittle(TestPyncclPipe):
    options: ClassVar[dict[str, Any]] = {"copy_bytes": 4096}
