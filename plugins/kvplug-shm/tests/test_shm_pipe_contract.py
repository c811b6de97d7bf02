"""The pipe "shm" is judged by the conformance kit."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvplug_testing import PipeContract


class TestShmPipe(PipeContract):
    transport = "shm"


@pytest.mark.variant
class TestShmPipeThatNeverSpins(PipeContract):
    """Everybody who waits sleeps, and most messages are larger than a ring."""

    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"slots": 3, "slot_bytes": 12_000, "spin_us": 0}
    lies = 15
