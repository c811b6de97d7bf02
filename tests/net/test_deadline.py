"""Deadlines: what a timeout may be."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from kvplug import Config, ConfigError, StatelessGroup, connect_pipe, listen_pipe
from kvplug.net.deadline import Deadline
from kvplug.transport import Credentials, Listener, QueueContext, StoreContext, Transfer
from kvplug_testing.memory.queue import MemoryQueueEndpoint
from kvplug_testing.memory.store import MemoryStore


@pytest.mark.parametrize("timeout", [None, math.inf, 1e10, 1e300, 2**63])
def test_a_timeout_that_no_clock_can_hold_is_for_ever(timeout: float | None) -> None:
    remaining = Deadline.after(timeout).remaining()
    assert remaining is None


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf, "5", b"5", [5], timedelta(seconds=5)])
def test_what_is_not_a_timeout_is_refused_by_name(timeout: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"timeout: .* was given; allowed is a number of seconds, 0 or more"
    ):
        Deadline.after(timeout)


def test_every_call_refuses_what_is_not_a_timeout_before_it_does_anything() -> None:
    """Of one object of each kind; what a kind's own calls do, its ABC's other users do too."""
    group = StatelessGroup.create("unix:", rank=0, world_size=1)
    writer = MemoryQueueEndpoint(QueueContext(options=None, credentials=Credentials())).create([])
    store = MemoryStore(StoreContext(options=None, credentials=Credentials()))
    listener = Listener.open("unix:", Credentials(), "test")
    server = listen_pipe(Config(host=f"unix:@kvplug-test-deadline-{os.getpid()}"))
    job = store.submit_lookup([])
    calls: list[Callable[..., Any]] = [
        lambda timeout: group.get("key", timeout=timeout),
        lambda timeout: group.barrier(timeout=timeout),
        lambda timeout: group.all_gather(1, timeout=timeout),
        writer.wait_until_ready,
        lambda timeout: writer.enqueue(1, timeout),
        lambda timeout: store.submit_lookup([], timeout=timeout),
        lambda timeout: store.submit_remove(None, timeout=timeout),
        job.wait,
        job.wait_settled,
        Transfer(0).wait,
        listener.accept,
        server.accept,
        lambda timeout: connect_pipe(Config(), contact=server.contact, timeout=timeout),
        *(each.close for each in (group, writer, store)),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="timeout: '5' was given"):
            call(timeout="5")
    assert group.all_gather(1, timeout=5) == [1]
    for each in (group, writer, store, listener, server):
        each.close()
