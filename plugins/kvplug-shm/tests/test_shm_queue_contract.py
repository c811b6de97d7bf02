"""The message queue "shm" is judged by the conformance kit, with readers in memory."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvplug_testing import MessageQueueContract


class TestShmQueue(MessageQueueContract):
    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"keep_bytes": "1 MiB", "pool_bytes": "4 MiB"}


@pytest.mark.variant
class TestShmQueueInPython(MessageQueueContract):
    """Without the compiled steps."""

    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"native": False}
