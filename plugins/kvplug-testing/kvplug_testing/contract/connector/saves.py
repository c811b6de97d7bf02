"""What is saved, and what counts as saved (law CONN-11)."""

from __future__ import annotations

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.engine import request_of
from kvplug_testing.waits import Call

_LONG_S = 60.0
"""For a prompt of thousands of tokens on a busy host: how long it takes is not judged."""


class Saves(ConnectorSuite):
    """Saves that are refused, and saves that find no memory on their way."""

    @law("CONN-11", "CONN-2")
    def test_what_was_refused_is_saved_by_the_next_request_that_computes_it(self) -> None:
        prefill, decode = self.pair(num_blocks=128)
        with self.refusing_saves():
            params = self.stored(prefill, range(100), "refused")
        prompt = request_of("early", range(100), params=params)
        found, _ = Call(lambda: decode.matched(prompt)).result()
        assert not found, f"{found} tokens are promised, and no save was kept"
        params = self.stored(prefill, range(100), "again")
        prompt = request_of("late", range(100), params=params)
        blocks, found, report = Call(lambda: decode.load(prompt)).result()
        assert found, "what was refused once is never saved: it counts as saved"
        assert not report.invalid_block_ids, "what was promised did not come"
        assert decode.is_right(prompt.token_ids, blocks, 100), "the KV is wrong"

    @law("CONN-11", "CONN-10", "CONN-4", needs="devices")
    def test_a_prompt_larger_than_the_staging_memory_is_kept_whole(self) -> None:
        """1 MiB of staging memory is for 2,730 tokens."""
        tokens = range(8200)
        config = {"device": "simulated", "staging_size": 1 << 20}
        engine = self.both(device="simulated", num_blocks=1100, config=config)
        blocks, _ = Call(lambda: engine.hand_off(request_of("stored", tokens))).result(_LONG_S)
        engine.cache.free(blocks)
        prompt = request_of("a", tokens)
        theirs, found, _ = self.promised(engine, prompt)
        assert found == 8192, f"{found} of 8192 tokens were kept"
        Call(lambda: engine.step([(prompt, theirs, found, 8)])).result(_LONG_S)
        assert engine.is_right(prompt.token_ids, theirs, 8200), "the KV is wrong"
