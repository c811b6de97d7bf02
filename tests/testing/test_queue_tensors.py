"""The suite of message queues, over the queue "memory" and over one between processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvplug.testing import MessageQueueContract
from kvplug.testing.contract.recipes import module_at

subject = module_at(str(Path(__file__).parent / "subjects" / "socket_queue.py"))


class TestMemoryQueue(MessageQueueContract):
    transport = "memory"


class TestSocketQueue(MessageQueueContract):
    def make_endpoint(self, context: Any) -> Any:
        return subject.SocketQueueEndpoint(context)
