"""A fake engine without a model: a paged cache, and the calls that a real engine makes to its connector.

:class:`FakeEngine` makes them step by step, as a test calls it. :class:`Schedule` makes random valid calls,
and checks the connector's promises after each step.
"""

from __future__ import annotations

from kvplug_testing.engine.cache import (
    HEAD_SIZE,
    MODEL,
    NUM_HEADS,
    NUM_LAYERS,
    PagedCache,
    kv_of,
    layout_of,
    model_of,
)
from kvplug_testing.engine.fake import CallOrder, FakeEngine, PlannedStep, Scheduled, request_of
from kvplug_testing.engine.requests import Arrival
from kvplug_testing.engine.schedule import Schedule

__all__ = [
    "HEAD_SIZE",
    "MODEL",
    "NUM_HEADS",
    "NUM_LAYERS",
    "Arrival",
    "CallOrder",
    "FakeEngine",
    "PagedCache",
    "PlannedStep",
    "Schedule",
    "Scheduled",
    "kv_of",
    "layout_of",
    "model_of",
    "request_of",
]
