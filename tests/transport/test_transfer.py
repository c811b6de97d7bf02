"""A transfer ends once, whatever interrupts the calls on it."""

from __future__ import annotations

import signal
import threading

import pytest

from kvplug import ClosedError
from kvplug.transport import Transfer


def test_a_signals_handler_may_end_the_transfer_that_its_thread_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = Transfer(10)
    event = threading.Event

    def interrupted() -> threading.Event:  # in wait(), with the transfer's lock
        signal.raise_signal(signal.SIGUSR1)
        return event()

    monkeypatch.setattr(threading, "Event", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: transfer.fail(ClosedError("the pipe was aborted")))
    try:
        with pytest.raises(ClosedError, match="aborted"):
            transfer.wait(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
