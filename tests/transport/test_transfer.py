"""A transfer ends once, whatever interrupts the calls on it."""

from __future__ import annotations

import signal
import threading

import pytest

from kvplug import ClosedError
from kvplug.transport import Transfer
from kvplug_testing.contract.forked_child import in_forked_child


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


def test_a_transfer_whose_lock_a_thread_has_has_failed_in_a_forked_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer, event = Transfer(10), threading.Event
    inside, go_on = event(), event()

    def held_up() -> threading.Event:  # in wait(), with the transfer's lock
        if threading.current_thread() is waiting:
            inside.set()
            go_on.wait(20)
        return event()

    def look() -> str:
        called: list[Transfer] = []
        transfer.add_done_callback(called.append)
        try:
            transfer.wait(5)
        except ClosedError as e:
            return "" if transfer.done() and called == [transfer] and transfer.error() is e else "not ended"
        return "it succeeded"

    waiting = threading.Thread(target=transfer.wait, args=(20,))
    monkeypatch.setattr(threading, "Event", held_up)
    waiting.start()
    assert inside.wait(20)
    try:
        assert not (wrong := in_forked_child(look)), f"in a forked child {wrong}"
    finally:
        go_on.set()
        transfer.finish()
        waiting.join()
    assert transfer.done()
    assert transfer.error() is None
