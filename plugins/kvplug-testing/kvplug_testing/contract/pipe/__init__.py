"""The suite of pipes: :class:`PipeContract`."""

from __future__ import annotations

from kvplug_testing.contract.pipe.backpressure import Backpressure
from kvplug_testing.contract.pipe.blocks import BlockMessages
from kvplug_testing.contract.pipe.connecting import Connecting
from kvplug_testing.contract.pipe.deadlines import Deadlines
from kvplug_testing.contract.pipe.endings import Endings
from kvplug_testing.contract.pipe.endpoints import Endpoints
from kvplug_testing.contract.pipe.ends import PipeGeneral
from kvplug_testing.contract.pipe.exhaustion import Exhaustion
from kvplug_testing.contract.pipe.lying_peers import LyingPeers
from kvplug_testing.contract.pipe.order import Order
from kvplug_testing.contract.pipe.other_host import OtherHost
from kvplug_testing.contract.pipe.other_process import OtherProcess
from kvplug_testing.contract.pipe.recv_into import RecvInto
from kvplug_testing.contract.pipe.tensors import Tensors
from kvplug_testing.contract.pipe.threads import Threads
from kvplug_testing.contract.pipe.transfers import Transfers


class PipeContract(
    Tensors,
    Order,
    RecvInto,
    BlockMessages,
    Backpressure,
    Transfers,
    Deadlines,
    Threads,
    Endings,
    Endpoints,
    Connecting,
    OtherProcess,
    OtherHost,
    LyingPeers,
    Exhaustion,
    PipeGeneral,
):
    """Checks a transport of kind "pipe" against the laws ALL, END and PIPE.

    A test file for an installed transport is this::

        from kvplug_testing import PipeContract

        class TestMine(PipeContract):
            transport = "mine"

    All attributes and methods that it may set or override are in
    :class:`~kvplug_testing.contract.pipe.suite.PipeSuite`.
    """
