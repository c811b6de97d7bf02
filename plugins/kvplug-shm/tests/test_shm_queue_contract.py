"""The message queue "shm" is judged by the conformance kit, with readers in memory."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvplug_shm.memory.words import Words
from kvplug_testing import MessageQueueContract


class TestShmQueue(MessageQueueContract):
    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"keep_bytes": "1 MiB", "pool_bytes": "4 MiB"}


@pytest.mark.variant
class TestShmQueueWithoutNaps(MessageQueueContract):
    """Only a wake ends a sleep."""

    transport = "shm"

    @pytest.fixture(autouse=True)
    def _no_naps(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.function.__name__ == "test_forks_under_load_disturb_no_end":
            return  # an abort wakes once, and a thread that has not begun to sleep sleeps for one nap
        monkeypatch.setattr(Words, "NAP_S", 1000.0)
