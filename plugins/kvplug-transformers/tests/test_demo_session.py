"""The parent's patience with its workers, and what it does with those that do not answer."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from kvplug_testing.peers import nothing_left
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.session import DECODE, PREFILL, Session, WorkerSilentError

pytestmark = pytest.mark.timeout(60)

SILENT = [sys.executable, "-c", "import time; time.sleep(60)"]
REPORTING = """
import json, sys, time
for number in range(int(sys.argv[1])):
    print(json.dumps({"event": "progress", "done": number, "total": 8}), flush=True)
    time.sleep(float(sys.argv[2]))
print(json.dumps({"event": "prefilled", "seconds": 1.0}), flush=True)
sys.stdin.read()
"""


def reporting(times: int, pause_s: float = 0.4) -> list[str]:
    return [sys.executable, "-c", REPORTING, str(times), str(pause_s)]


@pytest.fixture
def session():
    """``session(prefill=argv, …)``: these programs, started; a second and a half of patience."""
    opened = []

    def open_(patience_s: float = 1.5, **programs: list[str]) -> Session:
        opened.append(Session(Display(quiet=True), programs, patience_s=patience_s))
        opened[0].pids = {name: opened[0].start(name).pid for name in programs}
        return opened[0]

    with nothing_left():
        yield open_
        began = time.monotonic()
        for one in opened:
            one.__exit__(WorkerSilentError)
        assert time.monotonic() - began < 5


def test_a_worker_that_reports_nothing_is_named_with_the_option_that_helps(session):
    why = r"the prefill process has reported nothing for \d s; .*longer with --patience"
    with pytest.raises(WorkerSilentError, match=why):
        session(prefill=SILENT).wait_for((PREFILL, "loaded"))


def test_a_stopped_worker_is_named_first(session):
    both = session(decode=SILENT, prefill=SILENT)
    os.kill(both.pids[PREFILL], signal.SIGSTOP)
    with pytest.raises(WorkerSilentError, match=r"the prefill process .* and is stopped"):
        both.wait_for((DECODE, "loaded"), (PREFILL, "loaded"))


def test_a_worker_that_continues_to_report_has_all_the_time_that_it_needs(session):
    (event,) = session(prefill=reporting(8)).wait_for((PREFILL, "prefilled"))
    assert event["seconds"] == 1.0


def test_what_a_model_generates_and_a_worker_reports_is_printed_without_control_characters(capfd):
    evil = "\x1b[31m\x07\x9b\r\x00"
    with Display() as display:
        display.show(DECODE, {"event": "text", "text": f"def f():\n\treturn {evil}"})
        display.end_of_text()
        display.note(f"a note{evil}")
    out, err = capfd.readouterr()
    assert out.startswith("def f():\n\treturn ") and "a note" in err
    assert (out + err).replace("\n", "").replace("\t", "").isprintable()


# -- a worker ----------------------------------------------------------------------------------------
