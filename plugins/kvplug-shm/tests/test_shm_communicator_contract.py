"""The communicator "shm" is judged by the conformance kit: ranks as threads, and as processes."""

from __future__ import annotations

import pytest

from kvplug_testing import DeviceCommunicatorContract


@pytest.mark.full
class TestShmCommunicator(DeviceCommunicatorContract):
    transport = "shm"


@pytest.mark.variant
class TestShmCommunicatorInProcesses(DeviceCommunicatorContract):
    transport = "shm"
    ends_are_processes = True
