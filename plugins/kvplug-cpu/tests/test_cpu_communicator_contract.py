"""The communicator "cpu" is judged by the conformance kit: ranks as threads, and as processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from kvplug_testing import DeviceCommunicatorContract


class TestCpuCommunicator(DeviceCommunicatorContract):
    transport = "cpu"
    waivers: ClassVar[Mapping[str, str]] = {
        "test_a_forked_child_holds_none_of_the_descriptors": (
            "gloo keeps its sockets, and has no call that closes them in a forked child"
        )
    }


@pytest.mark.variant
class TestCpuCommunicatorInProcesses(DeviceCommunicatorContract):
    transport = "cpu"
    ends_are_processes = True
