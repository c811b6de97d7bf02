"""The suite of connectors: :class:`ConnectorContract`."""

from __future__ import annotations

from kvplug_testing.contract.connector.ends import Ends
from kvplug_testing.contract.connector.failures import Failures
from kvplug_testing.contract.connector.figures import Figures
from kvplug_testing.contract.connector.lending import Lending
from kvplug_testing.contract.connector.order import Order
from kvplug_testing.contract.connector.preemption import Preemption
from kvplug_testing.contract.connector.promises import Promises
from kvplug_testing.contract.connector.references import References
from kvplug_testing.contract.connector.schedules import Schedules


class ConnectorContract(Promises, Failures, Lending, Preemption, Schedules, Figures, Order, References, Ends):
    """Judges a connector by the laws CONN, REF, and those for everything with an end.

    A test file for an installed connector is this::

        from kvplug_testing import ConnectorContract

        class TestMine(ConnectorContract):
            connector = "mine"

    What it may set or override is in :class:`~kvplug_testing.contract.connector.suite.ConnectorSuite`.
    """
