"""The queue "shm" is judged by the conformance kit with all its readers on the network."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.transport import QueueEndpoint
from kvplug_testing import MessageQueueContract


@pytest.mark.variant
class TestShmQueueOverTheNetwork(MessageQueueContract):
    transport = "shm"

    def endpoint(self, **context: Any) -> QueueEndpoint:
        return super().endpoint(**{"local_reader_ranks": (), **context})
