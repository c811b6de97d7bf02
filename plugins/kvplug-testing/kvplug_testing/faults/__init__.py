"""Faults as plans: what goes wrong with which message, decided by a seed, over any pipe or queue.

:class:`FaultyPipe` goes around one pipe, :class:`FaultyEndpoint` around all pipes of a transport;
``transport = "faulty"`` in a config does so for an operator. :class:`FaultyQueue`,
:class:`FaultyQueueEndpoint` and ``queue = "faulty"`` do the same to message queues. A lookup buffer and a
connector reach each other over pipes, so that their faults are those of the pipes. No plan reaches the
collectives of a communicator.
"""

from kvplug_testing.faults.pipe import FaultyPipe
from kvplug_testing.faults.plan import Plan, Rule, read_plan
from kvplug_testing.faults.queue import FaultyQueue, FaultyQueueEndpoint
from kvplug_testing.faults.schedule import FaultSchedule, Injection, schedule
from kvplug_testing.faults.transport import FaultyEndpoint

__all__ = [
    "FaultSchedule",
    "FaultyEndpoint",
    "FaultyPipe",
    "FaultyQueue",
    "FaultyQueueEndpoint",
    "Injection",
    "Plan",
    "Rule",
    "read_plan",
    "schedule",
]
