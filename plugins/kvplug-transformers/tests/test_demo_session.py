"""The parent's patience with its workers, and what it does with those that do not listen."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import time
from typing import ClassVar

import pytest

from kvplug_testing.peers import nothing_left
from kvplug_transformers.demo import session as module
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.runs import decode_and_compare
from kvplug_transformers.demo.session import DECODE, PREFILL, Session, WorkerSilentError
from kvplug_transformers.demo.settings import DemoSettings

pytestmark = pytest.mark.timeout(60)

SILENT = [sys.executable, "-c", "import time; time.sleep(60)"]
SPEAKING = """
import json, sys, time
for number in range(8):
    print(json.dumps({"event": "progress", "done": number, "total": 8}), flush=True)
    time.sleep(0.4)
print(json.dumps({"event": "prefilled", "seconds": 1.0}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def session():
    """``session(prefill=argv, …)``: these programs, started; a second and a half of patience."""
    opened = []

    def open_(**programs: list[str]) -> Session:
        opened.append(Session(Display(quiet=True), programs, patience_s=1.5))
        for name in programs:
            opened[0].start(name)
        return opened[0]

    with nothing_left():
        yield open_
        began = time.monotonic()
        for one in opened:
            one.__exit__(WorkerSilentError)
        assert time.monotonic() - began < 5


def test_a_worker_that_reports_nothing_is_named_and_what_to_do_is_said(session):
    said = r"the prefill process has reported nothing for \d s; .*longer with --patience"
    with pytest.raises(WorkerSilentError, match=said):
        session(prefill=SILENT).wait_for((PREFILL, "loaded"))


def test_where_one_is_stopped_that_one_is_named(session):
    both = session(decode=SILENT, prefill=SILENT)
    os.kill(both._children[PREFILL].pid, signal.SIGSTOP)
    with pytest.raises(WorkerSilentError, match=r"the prefill process .* and is stopped"):
        both.wait_for((DECODE, "loaded"), (PREFILL, "loaded"))


def test_a_worker_that_goes_on_reporting_has_all_the_time_it_wants(session):
    (said,) = session(prefill=[sys.executable, "-c", SPEAKING]).wait_for((PREFILL, "prefilled"))
    assert said["seconds"] == 1.0


def test_the_hours_in_which_the_parent_itself_was_stopped_do_not_count(session, monkeypatch):
    one = session(prefill=[sys.executable, "-c", SPEAKING.replace("range(8)", "range(2)")])
    hours = itertools.count(0, 3600)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(hours))
    one._patience_s = 8.0
    one.wait_for((PREFILL, "prefilled"))
    monkeypatch.undo()


def test_a_command_to_a_worker_that_does_not_read_stops_nobody(session):
    one = session(prefill=SILENT)
    began = time.monotonic()
    one.send(PREFILL, "encode", prompt="x" * 1_000_000)
    assert time.monotonic() - began < 4


def test_a_character_that_the_terminal_does_not_have_ends_nothing(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    with Display() as display:
        display.show(DECODE, {"event": "text", "text": "gr\u00fcn"})
    stdout.flush()
    assert stdout.buffer.getvalue() == b"gr?n"


class Answered:
    """A session whose workers have answered all that is asked."""

    lost: ClassVar = {}
    answers: ClassVar = {
        "decoded": {
            "ids": [1],
            "text": "a",
            "ttft_s": 0.3,
            "tokens_loaded": 16,
            "kv_bytes_per_token": 4,
            "finish_reason": "length",
            "error": "",
            "store": "peer",
            "stats": {"failures": {}, "ops": {"load": {"seconds": 0.2}}},
        },
        "recomputed": {"ttft_s": 2.0, "floor_s": 0.75, "pairs": []},
        "generated": {"ids": [1], "imported": []},
    }

    def send(self, *_, **__):
        pass

    def wait_for(self, *awaited, **_):
        return [self.answers[event] for _, event in awaited]


def test_the_floor_of_the_time_to_the_first_token_is_never_above_it():
    ready = {"transport": "cpu", "reasons": []}
    with Display(quiet=True) as display:
        report = decode_and_compare(
            Answered(), display, DemoSettings(prompt="a"), [1, 2], [], notes=[], ready=ready
        )
    assert (report.ttft_s, report.ttft_floor_s) == (0.3, 0.3)


def test_what_a_model_generates_and_a_worker_reports_is_printed_without_control_characters(capfd):
    evil = "\x1b[31m\x07\x9b\r\x00"
    with Display() as display:
        display.show(DECODE, {"event": "text", "text": f"def f():\n\treturn {evil}"})
        display.end_of_text()
        display.note(f"a note{evil}")
    out, err = capfd.readouterr()
    assert out.startswith("def f():\n\treturn ") and "a note" in err
    assert (out + err).replace("\n", "").replace("\t", "").isprintable()
