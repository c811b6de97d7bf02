"""One thread in each direction: a second one gets an error, and an interrupt leaves nothing taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvplug.transport import BusyError, ExclusiveUse


def test_a_second_thread_is_told_what_is_going_on() -> None:
    use = ExclusiveUse("sending")
    with use.taken(), pytest.raises(BusyError, match="already sending"), use.taken():
        pass
    with use.taken():
        pass


def test_a_block_that_raises_gives_it_back() -> None:
    use = ExclusiveUse("sending")
    with pytest.raises(ZeroDivisionError), use.taken():
        raise ZeroDivisionError
    with use.taken():
        pass


INTERRUPTED = """
import signal
from kvplug.transport import ExclusiveUse

def interrupt(*_):
    raise KeyboardInterrupt

use = ExclusiveUse("receiving")
signal.signal(signal.SIGALRM, interrupt)
for _ in range(3000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        while True:
            with use.taken():
                pass
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_whenever_a_call_is_interrupted_the_use_is_free_afterwards() -> None:
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
