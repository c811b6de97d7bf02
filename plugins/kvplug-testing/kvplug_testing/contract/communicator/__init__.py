"""The suite of device communicators: :class:`DeviceCommunicatorContract`."""

from __future__ import annotations

from kvplug_testing.contract.communicator.collectives import Collectives
from kvplug_testing.contract.communicator.moe import ExpertLayers
from kvplug_testing.contract.communicator.refusals import Refusals
from kvplug_testing.contract.communicator.taking_part import TakingPart


class DeviceCommunicatorContract(Collectives, ExpertLayers, Refusals, TakingPart):
    """Checks a transport of kind "communicator" against the laws ALL and COMM.

    A test file for an installed transport is this::

        from kvplug_testing import DeviceCommunicatorContract

        class TestMine(DeviceCommunicatorContract):
            transport = "mine"

    Its ranks are threads of one process; with ``ends_are_processes = True`` they are processes. All other
    attributes and methods that it may set or override are in
    :class:`~kvplug_testing.contract.communicator.suite.CommunicatorSuite`.
    """
