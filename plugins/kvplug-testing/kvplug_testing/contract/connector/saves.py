"""What is saved, and what counts as saved (law CONN-11)."""

from __future__ import annotations

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.engine import request_of

_LONG_S = 60.0
"""For a prompt of thousands of tokens on a busy host: how long it takes is not judged."""


class Saves(ConnectorSuite):
    """Saves that are refused, and saves that find no memory on their way."""

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
