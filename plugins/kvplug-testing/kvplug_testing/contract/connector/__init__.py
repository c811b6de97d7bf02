"""The suite of connectors: :class:`ConnectorContract`."""

from __future__ import annotations

from kvplug_testing.contract.connector.blocks_in_use import BlocksInUse
from kvplug_testing.contract.connector.endings import Endings
from kvplug_testing.contract.connector.failures import Failures
from kvplug_testing.contract.connector.promises import Promises
from kvplug_testing.contract.connector.references import References
from kvplug_testing.contract.connector.schedules import Schedules


class ConnectorContract(Promises, Failures, BlocksInUse, Schedules, References, Endings):
    """Checks a connector against the laws ALL, CONN and REF.

    A test file for an installed connector is this::

        from kvplug_testing import ConnectorContract

        class TestMine(ConnectorContract):
            connector = "mine"

    All attributes and methods that it may set or override are in
    :class:`~kvplug_testing.contract.connector.suite.ConnectorSuite`.
    """
