"""Promised tokens can be loaded, and no others (law CONN-2); the order of calls (CONN-1), figures (CONN-8),
and what counts as saved (CONN-11).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import attrs
import pytest

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import (
    BLOCK,
    KV_OF_A_TOKEN,
    PROMPT,
    ConnectorSuite,
    done,
    failed,
)
from kvplug_testing.engine import MODEL, FakeEngine, PagedCache, request_of
from kvplug_testing.engine.fake import roundtrip
from kvplug_testing.waits import Call, raises

_LONG_S = 60.0
"""For a prompt of thousands of tokens on a busy host: how long it takes is not judged."""


class Promises(ConnectorSuite):
    """One prompt at a time."""

    @law("CONN-2")
    def test_the_same_tokens_with_another_extra_are_another_prompt(self) -> None:
        prefill, decode = self.pair()
        params = self.stored(prefill, range(64), extra=b"one adapter")
        for number, extra in enumerate((b"another adapter", b"", b"one adapter\0")):
            prompt = request_of(f"r{number}", range(64), extra=extra, params=params)
            found = self.num_promised(decode, prompt)
            assert found == 0, f"{found} tokens computed with another extra are promised"
        self.promised(decode, request_of("a", range(64), extra=b"one adapter", params=params))

    @law("CONN-2")
    @pytest.mark.parametrize("change", [{"rope": "base=1e6"}, {"weights": "other"}, {"weights": ""}], ids=str)
    def test_nothing_of_another_model_is_promised(self, change: dict[str, Any]) -> None:
        ours = attrs.evolve(MODEL, **change)
        prefill = self.engine("producer", model=MODEL if ours.weights else ours)  # both are unknown
        decode = self.engine("consumer", model=ours)
        prompt = request_of("a", range(100), params=self.stored(prefill))
        assert self.num_promised(decode, prompt) == 0, "its KV means something else"

    @law("CONN-2", "CONN-1")
    def test_an_answer_depends_on_its_own_question_and_not_on_other_requests(self) -> None:
        _, decode, prompt = self.asking()
        found, _ = self.run(decode.matched, prompt)
        beside = self.num_promised(decode, attrs.evolve(prompt, request_id="b"))
        assert beside == found > 0, f"{found} tokens are promised, and {beside} of the same prompt beside it"
        assert self.run(decode.ask, prompt, BLOCK)[0] == found - BLOCK, "the second answer is another one"

    # -- the order of calls: the random schedules make the allowed ones ------------------------------

    @law("CONN-1")
    def test_a_load_into_a_cache_that_was_not_registered_is_refused_by_name(self) -> None:
        prefill = self.engine("producer")
        with mock.patch.object(FakeEngine, "begin"):
            decode = self.engine("consumer", seed=2)
        self.meet(decode)
        load = self.promised(decode, request_of("a", PROMPT, params=self.stored(prefill)))
        self._is_named("register_kv_caches", lambda: decode.step([load.work]))

    @law("CONN-1")
    def test_blocks_for_tokens_that_were_never_promised_are_refused_by_name(self) -> None:
        decode = self.engine("consumer")
        prompt = request_of("a", PROMPT)
        decode.scheduler.on_new_request(prompt)
        call = "update_state_after_alloc"
        breach = partial(getattr(decode.scheduler, call), prompt, (decode.allocate(100),), 96)
        self._is_named(call, breach)

    @staticmethod
    def _is_named(method: str, breach: Callable[[], Any]) -> None:
        error = Call(breach).end().error
        assert method in str(error), f"{method} is missing or comes too early, and this was raised: {error!r}"

    @law("CONN-1")
    def test_a_cache_that_does_not_match_the_config_is_refused(self) -> None:
        engine = self.engine("producer")
        others = PagedCache(block_size=8, num_blocks=3).tensors
        raises(ValueError, partial(engine.worker.register_kv_caches, others))

    # -- figures -------------------------------------------------------------------------------------

    @law("CONN-8", "ALL-5")
    @pytest.mark.parametrize("background", [False, True], ids=["", "background"])
    def test_each_match_save_and_load_is_counted_once_with_its_size_or_a_reason(
        self, background: bool
    ) -> None:
        self.skip_unless_possible(background)
        prefill, decode = self.pair(background=background, num_blocks=128)
        num_loaded = num_failed = 0
        for number in range(4):
            tokens = range(1000 * number, 1000 * number + 100)
            params = self.stored(prefill, tokens, f"s{number}")
            load = self.promised(decode, request_of(f"r{number}", tokens, params=params))
            with self.injecting_fault("fail" if number % 2 else ""):
                is_wrong = bool(self.run_load(load))
            num_failed += is_wrong
            num_loaded += 0 if is_wrong else load.found
        asked = request_of("asked", PROMPT, params=params)
        self.run(decode.matched, asked)
        for _ in range(3):  # as by an engine without free blocks
            self.run(decode.ask, asked)
        stats = self.run(decode.scheduler.get_stats)
        assert done(stats, "match") <= 5, f"five requests were asked about, one of them four times: {stats}"
        # They are loaded, which shows that the saves are done, whichever thread saves.
        stats = self.run(prefill.figures)
        assert (done(stats, "save"), failed(stats, "save")) == (4, 0), f"4 saves were made: {stats}"
        stats = self.run(decode.figures)
        counted = done(stats, "load"), failed(stats, "load")
        assert counted == (4 - num_failed, num_failed), f"{num_failed} of 4 loads failed: {stats}"
        loaded = stats["ops"]["load"]
        size = loaded["tokens"], loaded["bytes"]
        wanted = num_loaded, num_loaded * KV_OF_A_TOKEN
        assert size == wanted, f"{num_loaded} tokens were loaded: {loaded}"
        late = self.run(decode.figures)  # messages on its pipes may arrive after the last load
        assert not done(late, "load") + failed(late, "load"), f"no load has ended since the last: {late}"
        self.skip_unless_injected()
        assert num_failed == 2, f"2 loads were made to fail, and {num_failed} have"

    @law("CONN-8")
    @pytest.mark.parametrize("background", [False, True], ids=["", "background"])
    def test_the_status_of_a_side_is_plain_and_comes_at_any_time(self, background: bool) -> None:
        self.skip_unless_possible(background)
        prefill, decode = self.pair(background=background, num_blocks=128)
        sides = [prefill.scheduler, prefill.worker, decode.scheduler, decode.worker]
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.001):
                for side in sides:
                    roundtrip(side.get_status(), f"the status of {type(side).__name__}")

        watching = Call(watch)
        for number in range(4):
            tokens = range(1000 * number, 1000 * number + 100)
            params = self.stored(prefill, tokens, f"s{number}")
            self.run_load(self.promised(decode, request_of(f"r{number}", tokens, params=params)))
        is_over.set()
        watching.result(1.0)

    # -- what counts as saved --------------------------------------------------------------------

    @law("CONN-11", "CONN-2")
    def test_what_was_refused_is_saved_by_the_next_request_that_computes_it(self) -> None:
        prefill, decode = self.pair(num_blocks=128)
        with self.refusing_saves():
            params = self.stored(prefill, name="refused")
        found = self.num_promised(decode, request_of("early", PROMPT, params=params))
        assert not found, f"{found} tokens are promised, and no save was kept"
        params = self.stored(prefill, name="again")
        late = request_of("late", PROMPT, params=params)
        self.check_loads(decode, late, "what was refused once is never saved: it counts as saved")

    @law("CONN-11", "CONN-10", "CONN-4", needs="staging")
    def test_a_prompt_larger_than_the_staging_memory_is_kept_whole(self) -> None:
        """1 MiB of staging memory is for 2,730 tokens."""
        tokens = range(8200)
        config = {"device": "simulated", "staging_size": 1 << 20}
        engine = self.both(device="simulated", num_blocks=1100, config=config)
        blocks, _ = self.run(engine.hand_off, request_of("stored", tokens), within=_LONG_S)
        engine.cache.free(blocks)
        load = self.promised(engine, request_of("a", tokens))
        assert load.found == 8192, f"{load.found} of 8192 tokens were kept"
        self.run(engine.step, [load.work], within=_LONG_S)
        assert engine.is_right(load.prompt.token_ids, load.blocks, 8200), "the KV is wrong"
