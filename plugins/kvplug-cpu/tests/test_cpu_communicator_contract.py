"""The communicator "cpu" is judged by the conformance kit: ranks as threads, and as processes."""

from __future__ import annotations

import pytest

from kvplug_testing import DeviceCommunicatorContract


class TestCpuCommunicator(DeviceCommunicatorContract):
    transport = "cpu"


@pytest.mark.variant
class TestCpuCommunicatorInProcesses(DeviceCommunicatorContract):
    transport = "cpu"
    ends_are_processes = True
