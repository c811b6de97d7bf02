"""The suite of pipes: :class:`PipeContract`."""

from __future__ import annotations

from kvplug.testing.contract.pipe.deaths import Deaths
from kvplug.testing.contract.pipe.tensors import Tensors


class PipeContract(Tensors, Deaths):
    """Judges a transport of kind "pipe" by the laws ALL, END and PIPE.

    A test file for an installed transport is this::

        from kvplug.testing import PipeContract

        class TestMine(PipeContract):
            transport = "mine"

    What it may set or override is in :class:`~kvplug.testing.contract.pipe.suite.PipeSuite`.
    """
