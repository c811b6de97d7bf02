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


def test_a_transfer_that_a_thread_is_ending_has_failed_in_a_forked_child() -> None:
    transfer = Transfer(10)
    inside, go_on = threading.Event(), threading.Event()

    def end() -> None:  # as in finish(), before it is done
        with transfer._lock:
            inside.set()
            go_on.wait()
        transfer.finish()

    thread = threading.Thread(target=end)
    thread.start()
    inside.wait()

    def look() -> str:
        called: list[Transfer] = []
        transfer.add_done_callback(called.append)
        try:
            transfer.wait(5)
        except ClosedError as e:
            return "" if transfer.done() and called == [transfer] and transfer.error() is e else "not ended"
        return "it succeeded"

    try:
        assert not (wrong := in_forked_child(look)), f"in a forked child {wrong}"
    finally:
        go_on.set()
        thread.join()
    assert transfer.done()
    assert transfer.error() is None


def test_a_transfer_that_had_ended_is_in_a_forked_child_as_it_was() -> None:
    done, failed = Transfer(10), Transfer(10)
    done.finish()
    failed.fail(KeyError("of the test"))
    assert not in_forked_child(lambda: f"{done.error() or ''}" if done.done() else "not done")
    assert in_forked_child(lambda: f"{failed.error()!r}") == "KeyError('of the test')"
