"""What a pipe that has nothing to do costs."""

from __future__ import annotations

import resource
import threading
import time
from typing import Any

import pytest
import torch

from kvplug import TimeoutError
from kvplug_testing.contract.pipe.suite import fill
from kvplug_testing.waits import Call


@pytest.mark.timing
def test_waiting_costs_no_processor_time(local_pair: Any) -> None:
    one, _ = local_pair(max_in_flight_bytes=1000)
    fill(one)
    blocked = [
        Call(lambda: one.recv_tensor(timeout=1.5)),
        Call(lambda: one.send_tensor(torch.zeros(1 << 20), timeout=1.5)),
    ]
    time.sleep(0.3)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
    for each in blocked:
        each.raised(TimeoutError)


def test_small_messages_need_no_thread(local_pair: Any) -> None:
    one, other = local_pair()
    before = set(threading.enumerate())
    for number in range(1000):
        one.send_tensor(torch.tensor(number))
        assert other.recv_tensor().item() == number
    assert set(threading.enumerate()) <= before
