"""What the connector "lookup" saves at once, what it does not, and how saving ends."""

from __future__ import annotations

import threading
import time

import pytest

import faulty_engines as engines
from kvplug import ClosedError
from kvplug_testing.engine import FakeEngine, request_of

config, pair, tokens = engines.config, engines.pair, engines.tokens

KV_OF_100_TOKENS = engines.KV_OF_100_TOKENS

pytestmark = pytest.mark.timeout(60)

# -- saving --------------------------------------------------------------------------------------


def test_a_step_that_completes_many_prompts_saves_them_all() -> None:
    with pair() as (prefill, decode):
        scheduled = []
        for n in range(24):
            prompt = request_of(f"p{n}", tokens(20, first=1000 * n))
            blocks = prefill.allocate(20)
            prefill.scheduler.on_new_request(prompt)
            prefill.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
            scheduled.append((prompt, blocks, 0, 20))
        prefill.step(scheduled)
        for n in range(24):
            assert decode.matched(request_of(f"d{n}", tokens(20, first=1000 * n)))[0] == 16


def test_a_prompt_that_comes_twice_in_a_step_is_stored_once() -> None:
    with pair() as (prefill, decode):
        scheduled = []
        for name in "ab":
            prompt, blocks = request_of(name, tokens(20)), prefill.allocate(20)
            prefill.scheduler.on_new_request(prompt)
            prefill.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
            scheduled.append((prompt, blocks, 0, 20))
        prefill.step(scheduled)
        assert decode.matched(request_of("c", tokens(20)))[0] == 16
        assert len(prefill.worker._store) == 1


def test_what_is_gathered_and_not_yet_stored_is_bounded_in_bytes() -> None:
    options = {"lookup": {"max_unsaved": 3 * KV_OF_100_TOKENS}}
    with FakeEngine(config("producer", options=options), listen="unix:", num_blocks=128) as prefill:
        requests = [request_of(f"p{n}", tokens(100, first=1000 * n)) for n in range(5)]
        blocks = [prefill.allocate(100) for _ in requests]
        for prompt, table in zip(requests, blocks, strict=True):
            prefill.scheduler.on_new_request(prompt)
            prefill.scheduler.update_state_after_alloc(prompt, (table,), 0)
        prefill.step([(prompt, table, 0, 50) for prompt, table in zip(requests, blocks, strict=True)])
        assert prefill.figures()["failures"]["save"] == {"no_room": 2}
        prefill.step([(prompt, table, 50, 50) for prompt, table in zip(requests, blocks, strict=True)])
        prefill.worker._saver.settle()
        assert len(prefill.worker._store) == 3
        assert prefill.worker._saver.bytes_unsaved == 0


def test_a_prompt_larger_than_the_store_is_not_even_gathered() -> None:
    small = {"buffer_size": KV_OF_100_TOKENS // 2}
    with FakeEngine(config("producer", **small), listen="unix:") as prefill:
        prefill.prefill(request_of("a", tokens(100)), chunk=50)
        assert prefill.worker._saver.bytes_unsaved == 0
        assert prefill.figures()["failures"]["save"] == {"too_large": 1}


# -- the end -------------------------------------------------------------------------------------


def test_shutdown_does_not_wait_for_a_producer_that_never_comes() -> None:
    decode = FakeEngine(config("consumer", connect_timeout_s=60), connect="unix:@kvplug-test-never-comes")
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            decode.worker.wait_until_ready(60)
        except BaseException as e:
            outcome.append(e)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.3)
    begun = time.monotonic()
    decode.worker.shutdown()
    decode.scheduler.shutdown()
    assert time.monotonic() - begun < 3
    waiting.join(3)
    assert isinstance(outcome[0], ClosedError)


def test_shutdown_does_not_wait_for_room_in_a_full_store() -> None:
    options = {"simple": {"evict": "never"}, "lookup": {"save_timeout_s": 30}}
    full = {"buffer_size": int(1.5 * KV_OF_100_TOKENS), "options": options}
    with FakeEngine(config("producer", **full), listen="unix:") as prefill:
        for n in range(3):
            prefill.prefill(request_of(f"p{n}", tokens(100, first=1000 * n)))
        time.sleep(0.2)
        begun = time.monotonic()
        prefill.worker.shutdown()
        assert time.monotonic() - begun < 3
        assert not prefill.worker._saver._thread.is_alive()
