"""The suite of lookup buffers: :class:`LookupBufferContract`."""

from __future__ import annotations

from kvplug_testing.contract.lookup.ends import LookupGeneral
from kvplug_testing.contract.lookup.finding import Finding
from kvplug_testing.contract.lookup.handing_over import HandingOver


class LookupBufferContract(Finding, HandingOver, LookupGeneral):
    """Checks a transport of kind "lookup buffer" against the laws ALL and LOOKUP.

    A test file for an installed transport is this::

        from kvplug_testing import LookupBufferContract

        class TestMine(LookupBufferContract):
            transport = "mine"

    All attributes and methods that it may set or override are in
    :class:`~kvplug_testing.contract.lookup.suite.LookupSuite`.
    """
