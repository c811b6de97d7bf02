"""Ctrl-C, wherever it comes in a call of the store, leaves nothing taken that another thread waits for."""

from __future__ import annotations

from collections.abc import Callable

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
