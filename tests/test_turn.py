"""One thread in each direction: who is second is told, and an interrupt leaves nothing taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvplug.transport import BusyError, Turn


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


INTERRUPTED = """
import signal
from kvplug.transport import Turn

def interrupt(*_):
    raise KeyboardInterrupt

turn = Turn("receiving")
signal.signal(signal.SIGALRM, interrupt)
for _ in range(3000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        while True:
            with turn.taken():
                pass
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_whenever_a_call_is_interrupted_the_turn_is_free_afterwards() -> None:
    # In a process that nothing measures: an interrupt in the middle of coverage leaves its locks taken.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
