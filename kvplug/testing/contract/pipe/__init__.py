"""The suite of pipes: :class:`PipeContract`."""

from __future__ import annotations

from kvplug.testing.contract.pipe.across import Across
from kvplug.testing.contract.pipe.blocks import BlockMessages
from kvplug.testing.contract.pipe.deadlines import Deadlines
from kvplug.testing.contract.pipe.deaths import Deaths
from kvplug.testing.contract.pipe.endpoints import Endpoints
from kvplug.testing.contract.pipe.ends import Ends
from kvplug.testing.contract.pipe.forks import Forks
from kvplug.testing.contract.pipe.into import Into
from kvplug.testing.contract.pipe.leaks import Leaks
from kvplug.testing.contract.pipe.meetings import Meetings
from kvplug.testing.contract.pipe.order import Order
from kvplug.testing.contract.pipe.room import Room
from kvplug.testing.contract.pipe.stops import Stops
from kvplug.testing.contract.pipe.tensors import Tensors
from kvplug.testing.contract.pipe.transfers import Transfers
from kvplug.testing.contract.pipe.turns import Turns


class PipeContract(
    Tensors,
    Order,
    Into,
    BlockMessages,
    Room,
    Transfers,
    Deadlines,
    Turns,
    Ends,
    Endpoints,
    Across,
    Deaths,
    Stops,
    Meetings,
    Forks,
    Leaks,
):
    """Judges a transport of kind "pipe" by the laws ALL, END and PIPE.

    A test file for an installed transport is this::

        from kvplug.testing import PipeContract

        class TestMine(PipeContract):
            transport = "mine"

    What it may set or override is in :class:`~kvplug.testing.contract.pipe.suite.PipeSuite`.
    """
