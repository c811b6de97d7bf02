"""A resource runs out while a connector is made or used (law ALL-9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.contract.exhaustion import SHORT_S, Attempt, let_go, together
from kvplug_testing.engine import FakeEngine, request_of

_TOKENS: Final = 100
_TRIES: Final = 3
"""Loads until one must succeed after the limit: a connection that was lost is made anew meanwhile."""


class ConnectorAttempt(Attempt):
    """A producer and a consumer in this process.

    What fails while a step runs is reported to the engine, which computes it, and is no error.
    """

    def __init__(self, suite: ConnectorSuite) -> None:
        self._suite = suite
        self._engines: dict[str, FakeEngine] = {}
        self._numbers = itertools.count()

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        return self._make_producer, self._make_consumer, self._meet, self._serve

    def _make_producer(self) -> None:
        self._make("producer")

    def _make_consumer(self) -> None:
        self._make("consumer")

    def _make(self, role: str) -> None:
        config = self._suite.config_of(role, timeout_s=2 * SHORT_S, connect_timeout_s=2 * SHORT_S)

        def make() -> None:
            self._engines[role] = FakeEngine(config, make=self._suite.make_side)

        together(make, within=4 * self.timeout_s)

    def _meet(self) -> None:
        decode = self._engines["consumer"]
        together(
            partial(decode.scheduler.wait_until_ready, self.timeout_s),
            partial(decode.worker.wait_until_ready, self.timeout_s),
            within=4 * self.timeout_s,
        )

    def _serve(self) -> None:
        together(self._serve_one, within=4 * self.timeout_s)

    def _serve_one(self) -> int:
        """Compute a prompt, hand it over, load it. Returns how many tokens came."""
        prefill, decode = self._engines["producer"], self._engines["consumer"]
        number = next(self._numbers)
        tokens = range(number * 1000, number * 1000 + _TOKENS)
        _, params = prefill.hand_off(request_of(f"given {number}", tokens))
        prompt = request_of(f"taken {number}", tokens, params=params)
        blocks, found, report = decode.load(prompt)
        end = found if report.invalid_block_ids else _TOKENS  # what is computed from wrong KV is wrong too
        wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, end)
        unsaid = wrong - report.invalid_block_ids
        assert not unsaid, f"{len(unsaid)} blocks have wrong KV, which the step's report does not say"
        decode.finish(prompt, blocks)
        decode.free_blocks.extend(blocks)
        return 0 if report.invalid_block_ids else found

    def check(self) -> None:
        loaded: list[int] = []
        for _ in range(_TRIES):
            together(lambda: loaded.append(self._serve_one()), within=4 * self.timeout_s)
            if loaded[-1]:
                return
        raise AssertionError("nothing is loaded any more, though there is enough of everything again")

    def end(self) -> None:
        for engine in reversed(self._engines.values()):
            let_go(engine.scheduler.shutdown, engine.worker.shutdown)


class Exhaustion(ConnectorSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    def attempt(self) -> Attempt:
        return ConnectorAttempt(self)
