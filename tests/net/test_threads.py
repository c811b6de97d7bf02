"""Threads that are inside kvplug when the program leaves, in programs that really leave."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from typing import Any

import pytest

from kvplug.net.threads import EXIT_S, BackgroundThread

BEGINNING = """
import atexit, os, signal, sys, threading, time
from kvplug.transport import BackgroundThread, ExitGuard

def out(text):
    os.write(1, text.encode() + b" ")
"""
WORKS = """
wanted = threading.Event()
begun = threading.Event()

def work():
    begun.set()
    wanted.wait()
    time.sleep(0.2)  # at work without the interpreter's lock
    out("ended")

BackgroundThread(work, name="kvplug work", stop=wanted.set).start()
begun.wait()
"""
WAITS = """
begun = threading.Event()

def wait():
    begun.set()
    threading.Event().wait()

BackgroundThread(wait, name="kvplug wait", stop=lambda: None).start()
begun.wait()
"""
CALLED = """
class Called:
    def __init__(self):
        self.inside = False
        self.ended = threading.Event()
        self.begun = threading.Event()
        ExitGuard.register(self)

    def _end_at_exit(self):
        self.ended.set()

    def _is_in_use(self):
        return self.inside

    def call(self):
        self.inside = True
        self.begun.set()
        self.ended.wait()
        time.sleep(0.2)
        self.inside = False
        out("left")

called = Called()
threading.Thread(target=called.call, daemon=True).start()
called.begun.wait()
"""


def left(program: str, *, flags: tuple[str, ...] = (), before: str = "") -> tuple[Any, ...]:
    """A program's exit code and words; its stderr has to be empty."""
    done = ran(before + BEGINNING + program, *flags)
    assert not done.stderr, done.stderr
    return done.returncode, *done.stdout.split()


def ran(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("after", "printed"), [("", ("left", "goes", "on")), ("ExitGuard.hold()", ("left",))]
)
def test_a_call_that_failed_does_not_go_back_into_a_program_that_leaves(
    after: str, printed: tuple[str, ...]
) -> None:
    call = CALLED.replace('out("left")\n', f'out("left")\n        {after}\n        out("goes on")\n')
    # What is registered before kvplug is imported runs last, here for long enough.
    early = "import atexit, time\natexit.register(time.sleep, 0.5)\n"
    assert left(call + "sys.exit(7)", before=early) == (7, *printed)


def test_a_signals_handler_may_leave_the_program() -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nos.kill(os.getpid(), signal.SIGTERM)\n"
    assert left(WORKS + CALLED + program + "time.sleep(60)") in ((7, "ended", "left"), (7, "left", "ended"))


BLOCKS = """
lock = threading.Lock()
lock.acquire()
BackgroundThread(threading.Event().wait, name="kvplug blocked", stop=lock.acquire).start()
"""


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("program", [WAITS, BLOCKS, BLOCKS + WAITS], ids=["wait", "stop", "both"])
def test_what_nothing_ends_delays_the_exit_by_the_limit_in_total(program: str) -> None:
    code, began = left(program + "out(str(time.monotonic()))\nsys.exit(7)")
    assert code == 7
    assert EXIT_S <= time.monotonic() - float(began) < EXIT_S + 1.5


def test_a_forked_child_waits_for_nothing_of_its_parents() -> None:
    program = """
pid = os.fork()
if not pid:
    out(str(time.monotonic()))
    sys.exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
out(str(time.monotonic()))
os._exit(code)
"""
    code, began, ended = left(WAITS + CALLED + program, flags=("-W", "ignore"))
    assert code == 7
    assert float(ended) - float(began) < EXIT_S / 2


def test_after_the_wait_no_thread_is_started() -> None:
    early = """
import atexit

def late():
    try:
        BackgroundThread(print, name="kvplug late", stop=print).start()
    except RuntimeError as e:
        out("refused" if "interpreter shutdown" in str(e) else str(e))

atexit.register(late)  # what is registered before kvplug is imported runs last
"""
    assert left(WORKS, before=early) == (0, "ended", "refused")


# -- in this process -------------------------------------------------------------------------------


def test_a_thread_that_has_ended_is_forgotten_and_so_is_its_owner() -> None:
    class Owner:
        def work(self) -> None:
            pass

    owner = Owner()
    thread = BackgroundThread(owner.work, name="kvplug short", stop=owner.work)
    thread.start()
    thread.join()
    gone = weakref.ref(owner), weakref.ref(thread)
    del owner, thread
    assert [each() for each in gone] == [None, None]
