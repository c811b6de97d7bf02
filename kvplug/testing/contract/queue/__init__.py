"""The suite of message queues: :class:`MessageQueueContract`."""

from __future__ import annotations

from kvplug.testing.contract.queue.chunks import Chunks
from kvplug.testing.contract.queue.endings import Endings
from kvplug.testing.contract.queue.groups import Groups
from kvplug.testing.contract.queue.handles import Handles
from kvplug.testing.contract.queue.large import Large
from kvplug.testing.contract.queue.messages import Messages
from kvplug.testing.contract.queue.moments import Moments
from kvplug.testing.contract.queue.processes import Processes
from kvplug.testing.contract.queue.waiting import Waiting


class MessageQueueContract(Messages, Large, Handles, Chunks, Waiting, Groups, Endings, Processes, Moments):
    """Judges a transport of kind "queue" by the laws ALL and QUEUE.

    A test file for an installed transport is this::

        from kvplug.testing import MessageQueueContract

        class TestMine(MessageQueueContract):
            transport = "mine"

    What it may set or override is in :class:`~kvplug.testing.contract.queue.suite.QueueSuite`.
    """
