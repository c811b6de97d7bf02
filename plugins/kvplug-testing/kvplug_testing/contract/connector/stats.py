"""A connector's stats are correct (law CONN-8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import KV_OF_A_TOKEN, ConnectorSuite
from kvplug_testing.engine import FakeEngine, request_of


def done(figures: Mapping[str, Any] | None, op: str) -> int:
    """How many transfers of this operation succeeded."""
    return int((figures or {}).get("ops", {}).get(op, {}).get("count", 0))


def failed(figures: Mapping[str, Any] | None, op: str) -> int:
    """How many transfers of this operation failed, for any reason."""
    return sum((figures or {}).get("failures", {}).get(op, {}).values())


class Stats(ConnectorSuite):
    """The stats after successful and failed loads."""

    def _stats(self, engine: FakeEngine) -> Any:
        figures = self.run(engine.figures)
        if figures is not None:
            engine.scheduler.build_stats(figures).merge(figures)  # it is a snapshot
        return figures

    @law("CONN-8")
    def test_each_load_and_save_is_counted_once_with_its_size(self) -> None:
        prefill, decode = self.pair(num_blocks=128)
        self._stats(decode)
        num_tokens = 0
        for number in range(3):
            tokens = range(1000 * number, 1000 * number + 100)
            params = self.stored(prefill, tokens, f"s{number}")
            num_tokens += self.check_loads(decode, request_of(f"r{number}", tokens, params=params))[1]
        # They are loaded, which shows that the saves are done, whichever thread saves.
        stats = self._stats(prefill)
        assert (done(stats, "save"), failed(stats, "save")) == (3, 0), f"3 saves were made: {stats}"
        stats = self._stats(decode)
        assert (done(stats, "load"), failed(stats, "load")) == (3, 0), f"3 loads were made: {stats}"
        loaded = stats["ops"]["load"]
        assert loaded["tokens"] == num_tokens, f"{num_tokens} tokens were loaded: {loaded}"
        assert loaded["bytes"] == num_tokens * KV_OF_A_TOKEN, f"{num_tokens} tokens were loaded: {loaded}"
        assert sum(loaded["buckets"]) == 3, f"3 loads have 3 durations: {loaded}"
        late = self._stats(decode)  # messages on its pipes may arrive after the last load
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
    def test_each_load_that_fails_is_counted_once_with_a_reason(self) -> None:
        prefill, decode = self.pair(num_blocks=128)
        params = self.stored(prefill)
        self._stats(decode)
        for number in range(4):
            load = self.promised(decode, request_of(f"r{number}", range(100), params=params))
            with self.injecting_fault("fail" if number % 2 else ""):
                report = self.run(decode.step, [load.work])
            if number == 1:
                self.skip_unless_injected()
            assert bool(report.invalid_block_ids) == bool(number % 2)
        stats = self._stats(decode)
        assert (done(stats, "load"), failed(stats, "load")) == (2, 2), f"of 4 loads 2 failed: {stats}"

    @law("CONN-8", needs="background")
    def test_a_background_load_is_counted_once_however_it_ends(self) -> None:
        prefill, decode = self.pair(background=True, num_blocks=128)
        params = self.stored(prefill)
        self._stats(decode)
        for number in range(2):
            self.promised(decode, request_of(f"r{number}", range(100), params=params))
            with self.injecting_fault("fail" if number else ""):
                self.run_until_named(decode, f"r{number}")
        self.skip_unless_injected()
        stats = self._stats(decode)
        assert (done(stats, "load"), failed(stats, "load")) == (1, 1), f"of 2 loads 1 failed: {stats}"

    @law("CONN-8")
    def test_figures_of_several_workers_are_put_together(self) -> None:
        engine = self.engine("producer")
        one = {"ops": {}, "failures": {"load": {"timeout": 2}}}
        stats = engine.scheduler.build_stats(one)
        stats.merge(one)
        assert stats.snapshot()["failures"] == {"load": {"timeout": 4}}
        assert engine.scheduler.build_stats().snapshot() == {"ops": {}, "failures": {}}
