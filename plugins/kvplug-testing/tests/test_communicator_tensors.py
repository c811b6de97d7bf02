"""The suite of device communicators, over threads."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug_testing import DeviceCommunicatorContract
from kvplug_testing.memory.communicator import MemoryCommunicator


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
