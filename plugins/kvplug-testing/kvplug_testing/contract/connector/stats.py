"""A connector's stats are correct (law CONN-8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import KV_OF_A_TOKEN, ConnectorSuite
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call


def done(figures: Mapping[str, Any] | None, op: str) -> int:
    """How many transfers of this operation succeeded."""
    return int((figures or {}).get("ops", {}).get(op, {}).get("count", 0))


def failed(figures: Mapping[str, Any] | None, op: str) -> int:
    """How many transfers of this operation failed, for any reason."""
    return sum((figures or {}).get("failures", {}).get(op, {}).values())


class Stats(ConnectorSuite):
    """The stats after successful and failed loads."""

    @staticmethod
    def _said(engine: FakeEngine) -> Any:
        figures = Call(engine.figures).result()
        if figures is not None:
            engine.scheduler.build_stats(figures).merge(figures)  # it is a snapshot
        return figures

    @law("CONN-8")
    def test_each_load_is_counted_once_with_its_size(self) -> None:
        prefill, decode = self.pair()
        params = [self.stored(prefill, range(1000 * n, 1000 * n + 100), f"s{n}") for n in range(3)]
        self._said(decode)
        num_tokens = 0
        for number in range(3):
            tokens = range(1000 * number, 1000 * number + 100)
            prompt = request_of(f"r{number}", tokens, params=params[number])
            num_tokens += self.run(decode.load, prompt)[1]
        said = self._said(decode)
        assert (done(said, "load"), failed(said, "load")) == (3, 0), f"3 loads were made: {said}"
        loaded = said["ops"]["load"]
        assert loaded["tokens"] == num_tokens, f"{num_tokens} tokens were loaded: {loaded}"
        assert loaded["bytes"] == num_tokens * KV_OF_A_TOKEN, f"{num_tokens} tokens were loaded: {loaded}"
        assert sum(loaded["buckets"]) == 3, f"3 loads have 3 durations: {loaded}"
        late = self._said(decode)  # messages on its pipes may arrive after the last load
        assert not done(late, "load") + failed(late, "load"), f"nothing was loaded since, and said is {late}"

    @law("CONN-8")
    def test_a_request_that_is_asked_about_often_is_one_match(self) -> None:
        """As by an engine without free blocks."""
        prefill, decode = self.pair()
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        Call(lambda: decode.matched(prompt)).result()
        for _ in range(3):
            Call(lambda: decode.ask(prompt)).result()
        said = Call(decode.scheduler.get_stats).result()
        assert done(said, "match") <= 1, f"one request was asked about four times: {said}"

    @law("CONN-8", "ALL-5")
    def test_each_load_that_fails_is_counted_once_with_a_reason(self) -> None:
        prefill, decode = self.pair(num_blocks=128)
        params = self.stored(prefill, range(100))
        self._said(decode)
        for number in range(4):
            self.inject_fault("fail" if number % 2 else "")
            prompt = request_of(f"r{number}", range(100), params=params)
            blocks, found, _ = self.promised(decode, prompt)
            scheduled = [(prompt, blocks, found, 100 - found)]
            report = self.run(decode.step, scheduled)
            if number == 1:
                self.skip_unless_injected()
            assert bool(report.invalid_block_ids) == bool(number % 2)
        self.inject_fault("")
        said = self._said(decode)
        assert (done(said, "load"), failed(said, "load")) == (2, 2), (
            f"of 4 loads that were made 2 failed, and counted are {said}"
        )

    @law("CONN-8", needs="background")
    def test_a_background_load_is_counted_once_however_it_ends(self) -> None:
        prefill, decode = self.pair(background=True, num_blocks=128)
        params = self.stored(prefill, range(100))
        self._said(decode)
        for number in range(2):
            prompt = request_of(f"r{number}", range(100), params=params)
            self.promised(decode, prompt)
            self.inject_fault("fail" if number else "")
            self.run_until_named(decode, f"r{number}")
        self.inject_fault("")
        self.skip_unless_injected()
        said = self._said(decode)
        assert (done(said, "load"), failed(said, "load")) == (1, 1), f"of 2 loads 1 failed: {said}"

    @law("CONN-8")
    def test_each_save_is_counted_once(self) -> None:
        prefill, decode = self.pair(num_blocks=128)
        for number in range(3):
            tokens = range(1000 * number, 1000 * number + 96)
            params = self.stored(prefill, tokens, f"s{number}")
            # Another engine loads it, which shows that the save is done, whichever thread saves.
            prompt = request_of(f"r{number}", tokens, params=params)
            self.promised(decode, prompt)
        said = self._said(prefill)
        assert done(said, "save") + failed(said, "save") <= 3, f"3 prompts were saved: {said}"
        assert done(said, "save") == 3, f"3 prompts were saved, and counted are {said}"

    @law("CONN-8")
    def test_figures_of_several_workers_are_put_together(self) -> None:
        engine = self.engine("producer")
        one = {"ops": {}, "failures": {"load": {"timeout": 2}}}
        stats = engine.scheduler.build_stats(one)
        stats.merge(one)
        assert stats.snapshot()["failures"] == {"load": {"timeout": 4}}
        assert engine.scheduler.build_stats().snapshot() == {"ops": {}, "failures": {}}
