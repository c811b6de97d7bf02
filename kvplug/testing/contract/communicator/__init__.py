"""The suite of device communicators: :class:`DeviceCommunicatorContract`."""

from __future__ import annotations

from kvplug.testing.contract.communicator.collectives import Collectives
from kvplug.testing.contract.communicator.endings import Endings
from kvplug.testing.contract.communicator.identity import Identity
from kvplug.testing.contract.communicator.refusals import Refusals


class DeviceCommunicatorContract(Collectives, Refusals, Endings, Identity):
    """Judges a transport of kind "communicator" by the laws ALL and COMM.

    A test file for an installed transport is this::

        from kvplug.testing import DeviceCommunicatorContract

        class TestMine(DeviceCommunicatorContract):
            transport = "mine"

    Its ranks are threads of one process; with ``ends_are_processes = True`` they are processes. What else it
    may set or override is in :class:`~kvplug.testing.contract.communicator.suite.CommunicatorSuite`.
    """
