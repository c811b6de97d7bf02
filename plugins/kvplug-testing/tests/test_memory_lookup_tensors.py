"""The lookup buffer "memory" keeps the laws."""

from __future__ import annotations

import pytest

from kvplug_testing import LookupBufferContract


@pytest.mark.full
class TestMemory(LookupBufferContract):
    transport = "memory"
    across_processes = False
