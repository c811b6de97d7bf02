"""The parent's patience with its workers, and what it does with those that do not answer."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvplug import KvplugError
from kvplug_testing.peers import nothing_left
from kvplug_transformers.demo import session as module
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.runs import decode_and_compare
from kvplug_transformers.demo.session import DECODE, PREFILL, Session, WorkerSilentError
from kvplug_transformers.demo.settings import DemoSettings
from kvplug_transformers.demo.worker import DemoWorker, choice_of

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


def test_hours_in_which_the_parent_itself_was_stopped_do_not_count(session, monkeypatch):
    one = session(patience_s=8.0, prefill=reporting(1, pause_s=1.5))
    hours = itertools.count(0, 3600)
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: next(hours))
        one.wait_for((PREFILL, "prefilled"))


def test_a_command_to_a_worker_that_does_not_read_blocks_nothing(session):
    one = session(prefill=SILENT)
    began = time.monotonic()
    one.send(PREFILL, "encode", prompt="x" * 1_000_000)
    assert time.monotonic() - began < 4


def test_a_character_that_the_terminal_lacks_ends_nothing(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    with Display() as display:
        display.show(DECODE, {"event": "text", "text": "gr\u00fcn"})
    stdout.flush()
    assert stdout.buffer.getvalue() == b"gr?n"


def test_what_a_model_generates_and_a_worker_reports_is_printed_without_control_characters(capfd):
    evil = "\x1b[31m\x07\x9b\r\x00"
    with Display() as display:
        display.show(DECODE, {"event": "text", "text": f"def f():\n\treturn {evil}"})
        display.end_of_text()
        display.note(f"a note{evil}")
    out, err = capfd.readouterr()
    assert out.startswith("def f():\n\treturn ") and "a note" in err
    assert (out + err).replace("\n", "").replace("\t", "").isprintable()


class Answered:
    """A session whose workers have answered every command."""

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


# -- a worker ----------------------------------------------------------------------------------------


class Commanded:
    """The parent of a worker: it has sent these commands, and keeps the events."""

    def __init__(self, *commands: dict[str, Any]) -> None:
        self._commands = commands
        self.events: list[str] = []

    def commands(self):
        return iter(self._commands)

    def send(self, event: str, **values: Any) -> None:
        self.events.append(event)


@pytest.mark.parametrize(("device", "steps"), [("cpu", []), ("cuda", ["warming", "warming"])])
def test_a_gpu_computes_once_before_anything_is_measured(llama, tmp_path, monkeypatch, device, steps):
    def build(*_: Any, **__: Any) -> None:
        raise KvplugError("the connector is built after that")

    monkeypatch.setattr(type(llama), "device", SimpleNamespace(type=device))
    loaded = SimpleNamespace(model=llama)
    monkeypatch.setattr("kvplug_transformers.model.load.load", lambda folder: loaded)
    monkeypatch.setattr("kvplug_transformers.demo.worker.build_connector", build)
    settings = {"config": None, "overrides": {}, "block_size": 16, "layout": None}
    parent = Commanded(
        {"op": "start", "role": "producer", "model": str(tmp_path), "threads": 1, "settings": settings},
        {"op": "open", "num_tokens": 300, "listen": None, "connect": None, "corrupt": False},
    )
    assert DemoWorker(parent).run() == 1
    assert parent.events == ["loaded", *steps, "error"]


def test_between_two_kinds_of_device_the_transport_for_cpu_tensors_is_reported():
    agreement = SimpleNamespace(
        transports={"cpu": SimpleNamespace(chosen="shm", candidates=())},
        checksum=None,
        converts=("device: ours cuda, theirs cpu",),
    )
    link = SimpleNamespace(agreement=agreement)
    reasons = ["integrity: off", "device: ours cuda, theirs cpu"]
    assert choice_of(link, "cuda") == {"transport": "shm", "reasons": reasons}
