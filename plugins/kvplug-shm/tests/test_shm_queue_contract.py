"""The message queue "shm" is judged by the conformance kit, with readers in memory."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvplug_shm.memory import waiting
from kvplug_shm.queue import local_reader, writer
from kvplug_testing import MessageQueueContract


class TestShmQueue(MessageQueueContract):
    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"keep_bytes": "1 MiB", "pool_bytes": "4 MiB"}


@pytest.mark.variant
class TestShmQueueInPython(MessageQueueContract):
    """Without the compiled steps, and only a wake ends a sleep."""

    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"native": False}

    @pytest.fixture(autouse=True)
    def _no_naps(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.function.__name__ == "test_forks_under_load_disturb_no_end":
            return  # an abort wakes once, and a thread that has not begun to sleep sleeps for one nap
        for module in (waiting, local_reader, writer):
            monkeypatch.setattr(module, "NAP_S", 1000.0)
