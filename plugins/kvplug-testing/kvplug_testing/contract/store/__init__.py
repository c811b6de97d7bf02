"""The suite of stores: :class:`StoreContract`."""

from __future__ import annotations

from kvplug_testing.contract.store.budget import Budget
from kvplug_testing.contract.store.contents import Contents
from kvplug_testing.contract.store.deadlines import Deadlines
from kvplug_testing.contract.store.devices import Devices
from kvplug_testing.contract.store.index import WhatIsThere


# pytest collects the last base first.
class StoreContract(Contents, Deadlines, Budget, WhatIsThere, Devices):
    """Checks a store against the laws ALL and STORE.

    A test file for an installed store is this::

        from kvplug_testing import StoreContract

        class TestMine(StoreContract):
            store = "mine"

    All attributes and methods that it may set or override are in
    :class:`~kvplug_testing.contract.store.suite.StoreSuite`.
    """
