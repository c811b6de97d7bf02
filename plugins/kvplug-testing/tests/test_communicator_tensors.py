"""The suite of device communicators, over threads and over processes."""

from __future__ import annotations

import pytest

from kvplug_testing import DeviceCommunicatorContract


@pytest.mark.full
class TestMemoryCommunicator(DeviceCommunicatorContract):
    transport = "memory"
