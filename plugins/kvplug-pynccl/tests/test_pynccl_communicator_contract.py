"""The communicator "pynccl" is judged by the conformance kit, over the fake NCCL and host memory."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvplug.transport import DeviceCommunicator
from kvplug_pynccl.options import PyncclCommunicatorOptions
from kvplug_testing import DeviceCommunicatorContract


class TestPyncclCommunicator(DeviceCommunicatorContract):
    options_class = PyncclCommunicatorOptions
    waivers: ClassVar[dict[str, str]] = {
        "test_a_forked_child_holds_none_of_the_descriptors": (
            "NCCL's own descriptors cannot be closed after a fork; kvplug's are"
        )
    }

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _over_the_fake(cls, fake_path: str) -> None:
        cls.options = {**cls.options, "library": fake_path}

    def make_communicator(self, context: DeviceCommunicator.Context) -> DeviceCommunicator:
        from kvplug_lab.gpu.pynccl import HostCommunicator, HostDevice

        return HostCommunicator(context, HostDevice(context.options.library))

    def import_all(self) -> None:
        import kvplug_lab.gpu.pynccl  # noqa: F401

        super().import_all()


@pytest.mark.variant
class TestPyncclCommunicatorThatComparesInProcesses(TestPyncclCommunicator):
    ends_are_processes = True
    options: ClassVar[dict[str, Any]] = {"check_order": True}
