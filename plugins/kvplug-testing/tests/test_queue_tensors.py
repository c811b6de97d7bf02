"""The suite of message queues, over the queue "memory"."""

from __future__ import annotations

import pytest

from kvplug_testing import MessageQueueContract


@pytest.mark.full
class TestMemoryQueue(MessageQueueContract):
    transport = "memory"
    across_processes = False
