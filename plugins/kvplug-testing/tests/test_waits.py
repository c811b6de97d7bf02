"""Calls in threads of their own, and waits on a busy host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvplug_testing import waits
from kvplug_testing.waits import Call, DeadlineError, until

BUSY = r"0\.4 s; on this host are 4\.0 runnable threads for each processor\n"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda load: monkeypatch.setattr(waits, "host_load", lambda: load)


def wait_for(event: threading.Event, way: str) -> Any:
    if way == "until":
        return until(event.is_set, 0.4)
    return Call(lambda: event.wait(2.0)).result(0.4)


@pytest.mark.parametrize("way", ["until", "call"])
def test_what_comes_late_counts_as_come_on_a_busy_host_only(load: Any, way: str) -> None:
    for number, is_busy in ((0.5, False), (4.0, True)):
        load(number)
        event = threading.Event()
        timer = threading.Timer(0.6, event.set)
        timer.start()
        if is_busy:
            wait_for(event, way)
        else:
            with pytest.raises(DeadlineError, match=r"0\.4 s; on this host are 0\.5 runnable"):
                wait_for(event, way)
        timer.join()
    load(4.0)
    event = threading.Event()
    with pytest.raises(DeadlineError, match=BUSY):
        wait_for(event, way)
    event.set()
