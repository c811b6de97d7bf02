"""The prefill worker is killed in the middle of the transfer."""

from __future__ import annotations

import sys

import pytest

from kvplug.testing.peers import nothing_left
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.orders import Orders
from kvplug_transformers.demo.processes import REFERENCE
from kvplug_transformers.demo.runs import run
from kvplug_transformers.demo.session import DECODE, PREFILL, DemoError

pytestmark = pytest.mark.timeout(300)

DYING = """
import os, signal, sys
from kvplug import Pipe
from kvplug_transformers.demo.worker import main

class Dying(Pipe):
    '''Kills its own process instead of sending the n-th large tensor.'''

    def __init__(self, pipe):
        self.pipe, self.left = pipe, int(sys.argv[1])

    closed = property(lambda self: self.pipe.closed)
    peer = property(lambda self: self.pipe.peer)

    def send_tensor(self, tensor, **more):
        if tensor is not None and tensor.nbytes >= 4096:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.pipe.send_tensor(tensor, **more)

    def recv_tensor(self, out=None, **more):
        return self.pipe.recv_tensor(out, **more)

    def close(self, *arguments, **more):
        self.pipe.close(*arguments, **more)

    def abort(self):
        self.pipe.abort()

main(wrap_pipe=Dying)
"""


def words(count: int) -> str:
    return " ".join(f"w{number * 7 % 100}" for number in range(count))


@pytest.fixture(scope="session")
def folder(tiny):
    return tiny("one")


@pytest.fixture
def orders(folder):
    def make(policy: str) -> Orders:
        return Orders(
            prompt=words(70),
            model=folder,
            max_new_tokens=8,
            overrides={"failure_policy": policy, "timeout_s": 20},
        )

    return make


@pytest.mark.parametrize("nth", [1, 4])
def test_decode_recomputes_what_did_not_arrive_and_says_so(orders, nth):
    programs = {PREFILL: [sys.executable, "-c", DYING, str(nth)]}
    with nothing_left(), Display(quiet=True) as display:
        report = run(orders("recompute"), display, programs)
    assert report.identical
    assert report.tokens_loaded == 0
    assert not report.ok
    assert any("could not be loaded" in reason for reason in report.reasons)
    assert any("killed by SIGKILL" in reason for reason in report.reasons)


def test_where_the_policy_is_to_fail_the_request_fails_and_says_so(orders, capsys):
    programs = {PREFILL: [sys.executable, "-c", DYING, "2"]}
    with nothing_left(), Display(quiet=True) as display:
        report = run(orders("fail"), display, programs)
    assert (report.identical, report.text, report.ttft_s) == (False, "", None)
    assert any("the policy is to fail" in reason for reason in report.reasons)
    assert "the policy is to fail" in capsys.readouterr().err


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_a_worker_that_does_not_start_is_named_with_its_last_words(orders, name):
    programs = {name: [sys.executable, "-c", "import sys; sys.exit('no such module')"]}
    said = rf"the {name} process ended with status 1:\nno such module"
    with nothing_left(), Display(quiet=True) as display, pytest.raises(DemoError, match=said):
        run(orders("recompute"), display, programs)


def test_the_reference_process_would_be_caught_importing_kvplug(orders):
    """The control of "never imports kvplug": one that does is found out."""
    program = f"import kvplug, runpy; runpy.run_path({REFERENCE[-1]!r}, run_name='__main__')"
    programs = {"reference": [sys.executable, "-c", program]}
    said = "the reference process has imported kvplug"
    with nothing_left(), Display(quiet=True) as display, pytest.raises(DemoError, match=said):
        run(orders("recompute"), display, programs)
