"""Ctrl-C, wherever it comes in a call of the store, leaves nothing taken that another thread waits for."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import Mock

import pytest

from kvplug.transport.store.format import opaque_format
from kvplug_host.key_table import KeyTable
from kvplug_host.pages.pages import Pages
from kvplug_host.pages.yielding_lock import YieldingLock

PROGRAM = """
import signal, threading, time
from kvplug_host.pages.pages import Pages

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
pages, events = Pages(1, 4096, None), []
pages.subscribe(events.append)
keys = [bytes([number]) * 32 for number in range(8)]
interrupted = 0
for _ in range(2000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        while True:
            pages.declare("main", bytes(16), keys, None)
            pages.withdraw(keys, "main")
    except KeyboardInterrupt:
        interrupted += 1
assert interrupted == 2000
events.clear()
other = threading.Thread(target=pages.declare, args=("other", bytes(16), [b"o" * 32], None), daemon=True)
other.start()
other.join(20)
assert not other.is_alive(), "another thread waits for the store's lock"
assert any(b"o" * 32 in event.keys for event in events), "listeners get no more events"
"""


def test_ctrl_c_in_a_call_of_a_store_leaves_nothing_taken(output_of: Callable[..., str]) -> None:
    output_of(PROGRAM)


def interrupting(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    """Ctrl-C comes in the second call of a method."""
    calls = itertools.count()
    method = getattr(owner, name)

    def interrupted(*args: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return method(*args)

    monkeypatch.setattr(owner, name, interrupted)
    return pytest.raises(KeyboardInterrupt)


def test_ctrl_c_during_a_snapshot_leaves_no_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, listener = Pages(1, 4096, Mock()), Mock()
    with interrupting(KeyTable, "copy_from", monkeypatch):
        pages.subscribe(listener)
    kept = weakref.ref(listener)
    del listener
    gc.collect()
    assert kept() is None, "the store collects events for it for ever"


def test_ctrl_c_during_an_allocation_leaves_no_slot_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, form = Pages(1, 1 << 20, Mock()), opaque_format(16 << 10)
    with interrupting(YieldingLock, "give_way", monkeypatch):
        pages.allocate(form, 60, 0)
    assert pages.allocate(form, 60, 0) is not None, "the slots are taken for ever"
