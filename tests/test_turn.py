"""One thread in each direction: who is second is told, and an interrupt leaves nothing taken."""

from __future__ import annotations

import signal
import threading

import pytest

from kvplug import BusyError, Turn


def test_a_second_thread_is_told_what_is_going_on() -> None:
    turn = Turn("sending")
    with turn.taken(), pytest.raises(BusyError, match="already sending"), turn.taken():
        pass
    with turn.taken():
        pass


def test_a_block_that_raises_gives_the_turn_back() -> None:
    turn = Turn("sending")
    with pytest.raises(ZeroDivisionError), turn.taken():
        raise ZeroDivisionError
    with turn.taken():
        pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_whenever_a_call_is_interrupted_the_turn_is_free_afterwards() -> None:
    assert threading.current_thread() is threading.main_thread()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    turn = Turn("receiving")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
                while True:
                    with turn.taken():
                        pass
            except KeyboardInterrupt:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
