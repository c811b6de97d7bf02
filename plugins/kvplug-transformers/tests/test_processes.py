"""The patience with processes, what happens to those that do not answer, and what of them is printed."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from kvplug_testing.peers import nothing_left
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.runs import DECODE, PREFILL
from kvplug_transformers.processes import Processes

pytestmark = pytest.mark.timeout(60)

SILENT = [sys.executable, "-c", "import time; time.sleep(60)"]
REPORTING = """
import json, sys, time
for number in range(int(sys.argv[1])):
    print(json.dumps({"event": "progress", "done": number, "total": 8}), flush=True)
    time.sleep(float(sys.argv[2]))
print(json.dumps({"event": "prefill", "is_answer": True, "seconds": 1.0}), flush=True)
sys.stdin.read()
"""


def reporting(times: int, pause_s: float = 0.4) -> list[str]:
    return [sys.executable, "-c", REPORTING, str(times), str(pause_s)]


@pytest.fixture
def processes():
    """``processes(prefill=argv, …)``: these programs, started; a second and a half of patience."""
    opened = []

    def open_(patience_s: float = 1.5, **programs: list[str]) -> Processes:
        opened.append(Processes(patience_s=patience_s, advice="give it longer"))
        for name, argv in programs.items():
            opened[0].start(name, argv)
        return opened[0]

    with nothing_left():
        yield open_
        began = time.monotonic()
        for one in opened:
            one.close(at_once=True)
        assert time.monotonic() - began < 5


def test_a_process_that_reports_nothing_is_named_with_what_helps(processes):
    why = r"prefill \(pid \d+\) reported nothing for 2 s; .*give it longer"
    with pytest.raises(TimeoutError, match=why):
        processes(prefill=SILENT).answers(PREFILL)


def test_a_stopped_process_is_named_first(processes):
    both = processes(decode=SILENT, prefill=SILENT)
    os.kill(both.pids[1], signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"prefill \(pid \d+\) is stopped"):
        both.answers(DECODE, PREFILL)


def test_a_process_that_does_not_read_a_long_command_is_named(processes):
    with pytest.raises(TimeoutError, match=r"prefill \(pid \d+\) reported nothing"):
        processes(prefill=SILENT).ask(PREFILL, "encode", prompt="a" * (1 << 22))


def test_a_process_that_continues_to_report_has_all_the_time_that_it_needs(processes):
    (answer,) = processes(prefill=reporting(8)).answers(PREFILL)
    assert answer["seconds"] == 1.0


LOGGING = """
import logging
print("{'a library prints this': 1}", flush=True)
from kvplug_transformers.processes import Parent
parent = Parent()
logging.error("from a peer: \\x1b[31m")
parent.report("start", is_answer=True)
"""


def test_lines_that_are_no_events_are_skipped_and_the_log_is_shown_without_control_characters(
    processes, capfd, monkeypatch
):
    monkeypatch.setenv("KVPLUG_LOG", "error")
    processes(50, prefill=[sys.executable, "-c", LOGGING]).answers(PREFILL)
    err = capfd.readouterr().err
    assert err.startswith("prefill: ") and "from a peer" in err
    assert "\x1b" not in err


def test_what_a_model_generates_and_a_worker_reports_is_printed_without_control_characters(capfd):
    evil = "\x1b[31m\x07\x9b\r\x00"
    with Display() as display:
        display.show(DECODE, {"event": "text", "text": f"def f():\n\treturn {evil}"})
        display.note(f"a note{evil}")
    out, err = capfd.readouterr()
    assert out.startswith("def f():\n\treturn ") and "a note" in err
    assert (out + err).replace("\n", "").replace("\t", "").isprintable()
