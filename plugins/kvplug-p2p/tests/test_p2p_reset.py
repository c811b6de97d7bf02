"""Weights change: what was handed off before is withdrawn, and a consumer forgets once its producers have."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.pairs import PipeAround
from kvplug_testing.waits import Call, until
from p2p_engines import PROMPT, an_address, config, failures, failures_of, loaded, pair, stored, until_named

pytestmark = pytest.mark.timeout(60)

LONG = {"lease_s": 600.0}


def test_what_was_handed_off_is_withdrawn_in_the_next_step() -> None:
    with pair(LONG) as (prefill, decode):
        early = request_of("a", PROMPT, params=stored(prefill, "one"))
        late = request_of("b", PROMPT, params=stored(prefill, "two"))
        assert decode.matched(early) == (96, False)
        prompt = request_of("three", PROMPT)
        blocks = prefill.admit(prompt)
        prefill.step([(prompt, blocks, 0, 100)])
        prefill.finish(prompt, blocks)  # no step knows of its hand-off yet
        assert prefill.scheduler.reset_cache() is True
        assert prefill.scheduler.has_pending_push_work()
        prefill.cache.weights = decode.cache.weights = 1
        until_named(prefill, "one", "two", "three", within=5)
        assert not prefill.scheduler.has_pending_push_work()
        assert loaded(decode, early) == 0
        assert loaded(decode, late) == 0
        assert loaded(decode, request_of("c", PROMPT, params=stored(prefill, "four"))) == 96


@pytest.mark.parametrize("starts_over", [False, True])
def test_a_prompt_that_was_computed_in_part_before_is_handed_off_only_if_it_starts_over(
    starts_over: bool,
) -> None:
    with FakeEngine(config("producer", LONG, host=an_address())) as prefill:
        prompt = request_of("a", PROMPT)
        blocks = prefill.admit(prompt)
        prefill.step([(prompt, blocks, 0, 40)])
        assert prefill.scheduler.reset_cache() is True
        start = 0 if starts_over else 40
        prefill.step([(prompt, blocks, start, 100 - start)])
        keeps, params = prefill.finish(prompt, blocks)
        assert keeps is (params is not None) is starts_over


def test_a_pull_under_way_is_broken_off() -> None:
    begun, go = threading.Event(), threading.Event()

    class HeldPipe(PipeAround):
        def _receive_tensor(self, out: Any, timeout: Any) -> Any:
            begun.set()
            go.wait(20)
            return super()._receive_tensor(out, timeout)

    prompt = range(4001)  # 1.5 MB of KV: more than waits in a socket
    with (
        contextlib.ExitStack() as ending,
        pair(LONG, num_blocks=600, consumer={"wrap_pipe": HeldPipe}) as (prefill, decode),
    ):
        ending.callback(go.set)
        params = stored(prefill, "stored", prompt)
        load = Call(lambda: loaded(decode, request_of("a", prompt, params=params)))
        waits.until(lambda: begun.is_set() or load.ended, what="a pull")
        assert prefill.scheduler.reset_cache() is True
        until_named(prefill, "stored", within=5)
        go.set()
        assert load.result() == 0
        assert failures_of(decode, "load").keys() <= {"peer_gone"}


def test_a_consumer_has_forgotten_once_its_producer_has(caplog: pytest.LogCaptureFixture) -> None:
    with pair(LONG) as (prefill, decode):
        until(decode.scheduler.reset_cache, what="that the producer has handed off nothing")
        params = stored(prefill)
        until(lambda: not decode.scheduler.reset_cache(), what="that the producer has handed off something")
        assert "first reset the engine" in caplog.text and prefill.address in caplog.text
        assert not decode.scheduler.has_pending_push_work()
        assert prefill.scheduler.reset_cache() is True
        prefill.step([])
        until(decode.scheduler.reset_cache, what="the producer's reset at the consumer")
        assert decode.matched(request_of("a", PROMPT, params=params)) == (0, False)
        assert failures(decode.scheduler, "match") == {"gone": 1}
        stored(prefill, "again")
        until(lambda: not decode.scheduler.reset_cache(), what="the producer's new hand-off")
        prefill.__exit__()  # what it handed off meanwhile may come once it is reached again
        until(lambda: not decode.scheduler.links, what="the end of its link")
        assert decode.scheduler.reset_cache() is False


def test_a_consumer_without_a_producer_has_nothing_to_forget() -> None:
    with FakeEngine(config("consumer", host=an_address(), peers=[f"{an_address()}-0"])) as decode:
        assert decode.scheduler.reset_cache() is True
