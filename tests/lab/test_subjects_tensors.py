"""The suites over two subjects of mutants that no plugin offers: a queue of the docs, a communicator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplug_testing import DeviceCommunicatorContract, MessageQueueContract
from kvplug_testing.contract.suite_ref import module_at

SUBJECTS = Path(__file__).parent / "subjects"
queue = module_at(str(SUBJECTS / "relay.py"))
communicator = module_at(str(SUBJECTS / "group_communicator.py"))

pytestmark = pytest.mark.variant


class TestRelay(MessageQueueContract):
    def make_endpoint(self, context: Any) -> Any:
        return queue.RelayEndpoint(context)


class TestGroupCommunicator(DeviceCommunicatorContract):
    """Threads, each with its own end of the group."""

    def make_communicator(self, context: Any) -> Any:
        return communicator.GroupCommunicator(context)
