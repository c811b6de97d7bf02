"""The suite of pipes: :class:`PipeContract`."""

from __future__ import annotations

from kvplug_testing.contract.pipe.devices import Devices
from kvplug_testing.contract.pipe.listeners import Listeners
from kvplug_testing.contract.pipe.sending import Sending
from kvplug_testing.contract.pipe.tensors import Tensors


class PipeContract(Tensors, Devices, Sending, Listeners):
    """Checks a transport of kind "pipe" against the laws ALL, END and PIPE.

    A test file for an installed transport is this::

        from kvplug_testing import PipeContract

        class TestMine(PipeContract):
            transport = "mine"

    All attributes and methods that it may set or override are in
    :class:`~kvplug_testing.contract.pipe.suite.PipeSuite`.
    """
