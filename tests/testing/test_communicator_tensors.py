"""The suite of device communicators, over threads and over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvplug.testing import DeviceCommunicatorContract
from kvplug.testing.contract.recipes import module_at

subject = module_at(str(Path(__file__).parent / "subjects" / "group_communicator.py"))


class TestMemoryCommunicator(DeviceCommunicatorContract):
    transport = "memory"
    across_processes = False


class TestGroupCommunicator(DeviceCommunicatorContract):
    """Threads, each with its own end of the group."""

    def make_communicator(self, context: Any) -> Any:
        return subject.GroupCommunicator(context)


class TestGroupCommunicatorInProcesses(TestGroupCommunicator):
    ends_are_processes = True
