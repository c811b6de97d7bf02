"""The suite of device communicators, over threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplug_testing import DeviceCommunicatorContract
from kvplug_testing.contract.suite_ref import module_at
from kvplug_testing.memory.communicator import MemoryCommunicator

subject = module_at(str(Path(__file__).parent / "subjects" / "group_communicator.py"))


@pytest.mark.full
class TestMemoryCommunicator(DeviceCommunicatorContract):
    transport = "memory"
    across_processes = False


class Uncompared(MemoryCommunicator):
    compares = False


@pytest.mark.variant
class TestMemoryCommunicatorThatComparesNothing(DeviceCommunicatorContract):
    """Ranks tell each other nothing, but for the numbers of tokens."""

    across_processes = False

    def make_communicator(self, context: Any) -> Any:
        return Uncompared(context)

    def test_its_ranks_are_not_judged_by_comparing(self) -> None:
        assert "do not compare" in self.compared_calls


@pytest.mark.variant
class TestGroupCommunicator(DeviceCommunicatorContract):
    """Threads, each with its own end of the group."""

    def make_communicator(self, context: Any) -> Any:
        return subject.GroupCommunicator(context)
