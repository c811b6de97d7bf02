"""The suites over a message queue and a communicator between processes, which are for tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplug_testing import DeviceCommunicatorContract, MessageQueueContract
from kvplug_testing.contract.suite_ref import module_at

SUBJECTS = Path(__file__).parent / "subjects"
queue = module_at(str(SUBJECTS / "socket_queue.py"))
communicator = module_at(str(SUBJECTS / "group_communicator.py"))

pytestmark = pytest.mark.variant


class TestSocketQueue(MessageQueueContract):
    most_bytes = 8 << 20  # a channel's frame is bounded

    def make_endpoint(self, context: Any) -> Any:
        return queue.SocketQueueEndpoint(context)


class TestGroupCommunicator(DeviceCommunicatorContract):
    """Threads, each with its own end of the group."""

    def make_communicator(self, context: Any) -> Any:
        return communicator.GroupCommunicator(context)
