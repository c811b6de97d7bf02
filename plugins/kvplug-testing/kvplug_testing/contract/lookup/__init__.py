"""The suite of lookup buffers: :class:`LookupBufferContract`."""

from __future__ import annotations

from kvplug_testing.contract.lookup.capacity import Capacity
from kvplug_testing.contract.lookup.contents import Contents
from kvplug_testing.contract.lookup.cost import Cost
from kvplug_testing.contract.lookup.endings import Endings
from kvplug_testing.contract.lookup.ends import LookupGeneral
from kvplug_testing.contract.lookup.exhaustion import Exhaustion
from kvplug_testing.contract.lookup.keys import Keys
from kvplug_testing.contract.lookup.lying_peers import LyingPeers
from kvplug_testing.contract.lookup.matching import Matching
from kvplug_testing.contract.lookup.processes import Processes
from kvplug_testing.contract.lookup.reading import Reading
from kvplug_testing.contract.lookup.taking import Taking


class LookupBufferContract(
    Contents,
    Keys,
    Matching,
    Reading,
    Taking,
    Capacity,
    Cost,
    Endings,
    Processes,
    LookupGeneral,
    LyingPeers,
    Exhaustion,
):
    """Checks a transport of kind "lookup buffer" against the laws ALL and LOOKUP.

    A test file for an installed transport is this::

        from kvplug_testing import LookupBufferContract

        class TestMine(LookupBufferContract):
            transport = "mine"

    All attributes and methods that it may set or override are in
    :class:`~kvplug_testing.contract.lookup.suite.LookupSuite`.
    """
