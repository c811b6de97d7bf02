"""The queue "shm" is judged by the conformance kit with all its readers on the network."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.net.trust.credentials import Secret
from kvplug.transport import Credentials, QueueEndpoint
from kvplug_testing import MessageQueueContract

SECRET = Credentials(Secret("a secret that these tests share"))


@pytest.mark.variant
class TestShmQueueOverTheNetwork(MessageQueueContract):
    transport = "shm"

    def endpoint(self, **context: Any) -> QueueEndpoint:
        network = {"local_reader_ranks": (), "host": "127.0.0.1", "credentials": SECRET}
        return super().endpoint(**{**network, **context})
