"""Promised tokens can be loaded, and no others (law CONN-2), and what counts as saved (law CONN-11)."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import BLOCK, PROMPT, ConnectorSuite
from kvplug_testing.engine import MODEL, request_of
from kvplug_testing.engine.cache import AXES

_LAYOUTS = [(axes, BLOCK, "") for axes in AXES] + [("BHTKD", 8, ""), ("KBHTD", BLOCK, "transposed")]
_CASES = [
    (range(70), range(100), 64),  # ends inside a block
    (range(15), range(100), 0),  # less than a block
    ([*range(40), 7, 7, 7], [*range(40), 8, 8, 8], 32),  # they differ inside a block
    ([1, 2, 120001] * 20, [1, 2, 120002] * 20, 0),  # ids that a tolerance would confuse
]
_LONG_S = 60.0
"""For a prompt of thousands of tokens on a busy host: how long it takes is not judged."""


class Promises(ConnectorSuite):
    """One prompt at a time."""

    @law("CONN-2")
    @pytest.mark.parametrize(("axes", "block_size", "block_format"), _LAYOUTS)
    def test_what_was_stored_is_loaded_into_its_blocks_on_each_layout(
        self, axes: str, block_size: int, block_format: str
    ) -> None:
        layout: dict[str, Any] = {"axes": axes, "block_size": block_size, "block_format": block_format}
        prefill, decode = self.pair(**layout)
        # A third prompt lies between the two, so that block tables are not plain ranges.
        params = [
            self.stored(prefill, range(1000 * n, 1000 * n + count), f"stored{n}")
            for n, count in enumerate((100, 7, 90))
        ]
        layers = range(len(decode.layer_names))
        before = [decode.cache.by_token(layer).copy() for layer in layers]
        used: set[int] = set()
        for n, count in ((0, 100), (2, 90)):
            prompt = request_of(f"r{n}", range(1000 * n, 1000 * n + count), params=params[n])
            blocks, found = self.check_loads(decode, prompt)
            assert found % block_size == 0, f"{found} tokens are promised: no whole blocks of {block_size}"
            used |= set(blocks)
        others = sorted(set(range(decode.cache.num_blocks)) - used)
        for layer in layers:
            now = decode.cache.by_token(layer)[others]
            assert_same(before[layer][others], now, "blocks that belong to no request were written")

    @law("CONN-2")
    @pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (32, 16)])
    def test_engines_with_blocks_of_other_sizes_load_what_they_can(self, ours: int, theirs: int) -> None:
        prefill, decode = self.pair(producer={"block_size": ours}, consumer={"block_size": theirs})
        prompt = request_of("a", range(100), params=self.stored(prefill))
        blocks, found, report = self.run(decode.load, prompt)
        assert found % theirs == 0 and not report.invalid_block_ids
        assert decode.is_right(prompt.token_ids, blocks, 100), "the KV is wrong"

    @law("CONN-2")
    @pytest.mark.parametrize(("stored", "asked", "most"), _CASES)
    def test_no_more_is_promised_than_the_common_prefix_in_whole_blocks(
        self, stored: list[int], asked: list[int], most: int
    ) -> None:
        prefill, decode = self.pair()
        prompt = request_of("a", asked, params=self.stored(prefill, stored))
        blocks, found, report = self.run(decode.load, prompt)
        assert found <= most and found % BLOCK == 0, f"{found} tokens are promised, and {most} can be had"
        assert not report.invalid_block_ids, "what was promised did not come"
        assert decode.is_right(prompt.token_ids, blocks, len(prompt.token_ids)), "the KV is wrong"

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
    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ({}, {"rope": "base=1e6"}),
            ({}, {"weights": "other"}),
            ({"weights": ""}, {"weights": ""}),  # unknown
        ],
    )
    def test_nothing_of_a_model_that_may_be_another_is_promised(
        self, theirs: dict[str, Any], ours: dict[str, Any]
    ) -> None:
        prefill = self.engine("producer", model=attrs.evolve(MODEL, **theirs))
        decode = self.engine("consumer", model=attrs.evolve(MODEL, **ours))
        prompt = request_of("a", range(100), params=self.stored(prefill))
        assert self.num_promised(decode, prompt) == 0, "its KV means something else"

    @law("CONN-2", "CONN-1")
    def test_an_answer_depends_on_its_own_question_and_not_on_other_requests(self) -> None:
        _, decode, prompt = self.asking()
        found, _ = self.run(decode.matched, prompt)
        beside = self.num_promised(decode, attrs.evolve(prompt, request_id="b"))
        assert beside == found > 0, f"{found} tokens are promised, and {beside} of the same prompt beside it"
        assert self.run(decode.ask, prompt, BLOCK)[0] == found - BLOCK, "asked again, it answers otherwise"

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

    @law("CONN-11", "CONN-10", "CONN-4", needs="devices")
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
