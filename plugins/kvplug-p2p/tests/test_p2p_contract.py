"""The connector "p2p" keeps the laws."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from kvplug_testing import ConnectorContract


class TestP2P(ConnectorContract):
    """Over the pipe "cpu", where the suite injects faults. Tests ask for loads in the background."""

    connector = "p2p"
    config = MappingProxyType({"transport": "cpu", "connect_timeout_s": 20})
    lends_blocks = True
    options = MappingProxyType({"async_load": False})


@pytest.mark.variant
class TestBetweenDevices(TestP2P):
    """Over a pipe that takes tensors of the simulated device."""

    config = MappingProxyType({"transport": "memory", "connect_timeout_s": 20})
    across_processes = False
    lied_to_processes = "no relay can stand in the pipe 'memory'"
