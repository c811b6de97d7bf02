"""Fault injection for any pipe or queue: a plan with a seed decides which messages get which faults.

:class:`FaultyPipe` wraps one pipe, :class:`FaultyEndpoint` all pipes of a transport; operators set
``transport = "faulty"`` in a config. :class:`FaultyQueue`, :class:`FaultyQueueEndpoint` and ``queue =
"faulty"`` do the same for message queues. Lookup buffers and connectors communicate over pipes, so faults of
the pipes are their faults. Plans do not cover the collectives of a communicator.
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
