"""A worker is killed in the middle of the transfer, does not start, or is not what it should be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvplug_testing.peers import nothing_left
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.processes import REFERENCE_COMMAND
from kvplug_transformers.demo.runs import run
from kvplug_transformers.demo.session import DECODE, PREFILL, REFERENCE, DemoError
from kvplug_transformers.demo.settings import DemoSettings

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

DYING = """
import os, signal, sys
from kvplug_transformers.demo.corruption import CorruptingPipe
from kvplug_transformers.demo.worker import main

class Dying(CorruptingPipe):
    '''Kills its own process instead of sending the n-th large tensor.'''

    left = int(sys.argv[1])

    def send_tensor(self, tensor, **more):
        if tensor is not None and tensor.nbytes >= 4096:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._pipe.send_tensor(tensor, **more)

main(wrap_pipe=Dying)
"""

ANSWERING = """
import json, sys
answers = json.loads(sys.argv[1])
while (command := json.loads(sys.stdin.readline()))["op"] != "stop":
    for event in answers[command["op"]]:
        print(json.dumps(event), flush=True)
"""


def answering(**answers: dict) -> list[str]:
    """A worker without a model: its answers to each command."""
    return [sys.executable, "-c", ANSWERING, json.dumps(answers)]


LOADED = [{"event": "loaded", "context": 512}]
TOKENS = [{"event": "tokens", "ids": [7, 14, 21], "stop": []}]


def words(count: int) -> str:
    return " ".join(f"w{number * 7 % 100}" for number in range(count))


@pytest.fixture(scope="session")
def folder(tiny):
    return tiny("one")


@pytest.fixture
def settings(folder):
    def make(policy: str, model: Path = folder, num_tokens: int = 70) -> DemoSettings:
        return DemoSettings(
            prompt=words(num_tokens),
            model=model,
            max_new_tokens=8,
            # The pages must cross the pipe that ends in the middle, not shared memory.
            overrides={"failure_policy": policy, "timeout_s": 20, "options.host.map": False},
        )

    return make


def test_decode_recomputes_what_did_not_arrive_and_reports_it(settings, tiny):
    """Some layers have arrived: small ones travel together."""
    wide = tiny("wide", hidden_size=512, num_key_value_heads=4, head_dim=128)
    programs = {PREFILL: [sys.executable, "-c", DYING, "2"]}
    with nothing_left(), Display(quiet=True) as display:
        report = run(settings("recompute", wide, 400), display, programs)
    assert report.identical
    assert report.tokens_loaded == 0
    assert not report.ok
    assert any("could not be loaded" in reason for reason in report.reasons)
    assert any("killed by SIGKILL" in reason for reason in report.reasons)


def test_where_the_policy_is_to_fail_the_request_fails_and_this_is_reported(settings, capsys):
    """Nothing has arrived when it dies."""
    generated = [{"event": "generated", "ids": [7], "imported": []}]
    programs = {
        PREFILL: [sys.executable, "-c", DYING, "1"],
        REFERENCE: answering(start=LOADED, generate=generated),
    }
    with nothing_left(), Display(quiet=True) as display:
        report = run(settings("fail"), display, programs)
    assert (report.identical, report.text, report.ttft_s) == (False, "", None)
    assert any("the policy is to fail" in reason for reason in report.reasons)
    assert "the policy is to fail" in capsys.readouterr().err


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_a_worker_that_does_not_start_is_named_with_its_last_words(settings, name):
    programs = {name: [sys.executable, "-c", "import sys; sys.exit('no such module')"]}
    why = rf"the {name} process ended with status 1:\nno such module"
    with nothing_left(), Display(quiet=True) as display, pytest.raises(DemoError, match=why):
        run(settings("recompute"), display, programs)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(settings):
    too_many = [{**TOKENS[0], "ids": [7] * 600}]
    programs = {
        PREFILL: answering(start=LOADED, encode=too_many),
        DECODE: answering(start=LOADED),
        REFERENCE: answering(start=LOADED),
    }
    why = "the prompt has 600 tokens, which with 8 new ones is more than the model's context of 512"
    with nothing_left(), Display(quiet=True) as display, pytest.raises(DemoError, match=why):
        run(settings("recompute"), display, programs)


def test_the_reference_process_would_be_caught_importing_kvplug(settings):
    """The control of "never imports kvplug": one that does is found out."""
    program = f"import kvplug, runpy; runpy.run_path({REFERENCE_COMMAND[-1]!r}, run_name='__main__')"
    ready = {"event": "ready", "transport": "cpu", "reasons": []}
    decoded = {
        "event": "decoded",
        "ids": [7],
        "text": "w7",
        "ttft_s": 1.0,
        "tokens_loaded": 0,
        "kv_bytes_per_token": 4,
        "finish_reason": "length",
        "error": "",
        "stats": {"failures": {}, "ops": {}},
        "store": "",
    }
    programs = {
        PREFILL: answering(
            start=LOADED,
            encode=TOKENS,
            open=[{"event": "opened", "contact": ""}, ready],
            prefill=[{"event": "prefilled", "seconds": 1.0, "found": 0}],
        ),
        DECODE: answering(
            start=LOADED,
            open=[ready],
            decode=[decoded],
            recompute=[{"event": "recomputed", "ttft_s": 1.0, "floor_s": None}],
        ),
        REFERENCE: [sys.executable, "-c", program],
    }
    why = "the reference process has imported kvplug"
    with nothing_left(), Display(quiet=True) as display, pytest.raises(DemoError, match=why):
        run(settings("recompute"), display, programs)
