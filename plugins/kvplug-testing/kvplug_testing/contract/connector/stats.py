"""A connector's stats are correct (law CONN-8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import KV_OF_A_TOKEN, ConnectorSuite
from kvplug_testing.engine import request_of


def done(figures: Mapping[str, Any] | None, op: str) -> int:
    """How many transfers of this operation succeeded."""
    return int((figures or {}).get("ops", {}).get(op, {}).get("count", 0))


def failed(figures: Mapping[str, Any] | None, op: str) -> int:
    """How many transfers of this operation failed, for any reason."""
    return sum((figures or {}).get("failures", {}).get(op, {}).values())


class Stats(ConnectorSuite):
    """The stats after successful and failed loads."""

    @law("CONN-8")
    def test_each_load_and_save_is_counted_once_with_its_size(self) -> None:
        prefill, decode = self.pair(num_blocks=128)
        num_tokens = 0
        for number in range(3):
            tokens = range(1000 * number, 1000 * number + 100)
            params = self.stored(prefill, tokens, f"s{number}")
            num_tokens += self.check_loads(decode, request_of(f"r{number}", tokens, params=params))[1]
        # They are loaded, which shows that the saves are done, whichever thread saves.
        stats = self.run(prefill.figures)
        assert (done(stats, "save"), failed(stats, "save")) == (3, 0), f"3 saves were made: {stats}"
        stats = self.run(decode.figures)
        assert (done(stats, "load"), failed(stats, "load")) == (3, 0), f"3 loads were made: {stats}"
        loaded = stats["ops"]["load"]
        size = loaded["tokens"], loaded["bytes"], sum(loaded["buckets"])
        assert size == (num_tokens, num_tokens * KV_OF_A_TOKEN, 3), f"{num_tokens} tokens, 3 loads: {loaded}"
        late = self.run(decode.figures)  # messages on its pipes may arrive after the last load
        assert not done(late, "load") + failed(late, "load"), f"nothing was loaded since, and it says {late}"

    @law("CONN-8")
    def test_a_request_that_is_asked_about_often_is_one_match(self) -> None:
        """As by an engine without free blocks."""
        _, decode, prompt = self.asking()
        self.run(decode.matched, prompt)
        for _ in range(3):
            self.run(decode.ask, prompt)
        stats = self.run(decode.scheduler.get_stats)
        assert done(stats, "match") <= 1, f"one request was asked about four times: {stats}"

    @law("CONN-8", "ALL-5")
    @pytest.mark.parametrize("background", [False, True], ids=["", "background"])
    def test_each_load_that_fails_is_counted_once_with_a_reason(self, background: bool) -> None:
        self.skip_unless_possible(background)
        prefill, decode = self.pair(background=background, num_blocks=128)
        params = self.stored(prefill)
        self.run(decode.figures)
        for number in range(4):
            load = self.promised(decode, request_of(f"r{number}", range(100), params=params))
            with self.injecting_fault("fail" if number % 2 else ""):
                self.run_load(load)
        self.skip_unless_injected()
        stats = self.run(decode.figures)
        assert (done(stats, "load"), failed(stats, "load")) == (2, 2), f"of 4 loads 2 failed: {stats}"
