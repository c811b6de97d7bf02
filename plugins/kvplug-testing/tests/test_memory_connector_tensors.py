"""The connector "memory" keeps the laws."""

from __future__ import annotations

import pytest

from kvplug_testing.memory.connector.suite import MemoryConnectorContract


@pytest.mark.full
class TestMemory(MemoryConnectorContract): ...
