"""The suite of message queues: :class:`MessageQueueContract`."""

from __future__ import annotations

from kvplug_testing.contract.queue.ends import QueueGeneral
from kvplug_testing.contract.queue.messages import Messages
from kvplug_testing.contract.queue.readers import Readers


class MessageQueueContract(Messages, Readers, QueueGeneral):
    """Checks a transport of kind "queue" against the laws ALL and QUEUE.

    A test file for an installed transport is this::

        from kvplug_testing import MessageQueueContract

        class TestMine(MessageQueueContract):
            transport = "mine"

    All attributes and methods that it may set or override are in
    :class:`~kvplug_testing.contract.queue.suite.QueueSuite`.
    """
