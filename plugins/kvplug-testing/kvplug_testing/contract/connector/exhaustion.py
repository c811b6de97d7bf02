"""A resource runs out while a connector is made or used (law ALL-9).

A load that fails while a step runs is expected: it is reported to the engine, which computes its blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.contract.ends import End, Ends
from kvplug_testing.engine import FakeEngine, request_of

_TOKENS: Final = 100
_TIMEOUT_S: Final = 2.0
_TRIES: Final = 3
"""Loads until one must succeed after the limit: a connection that was lost is made anew meanwhile."""
_numbers: Final = itertools.count()


class EngineEnd(End):
    """The engine that computes prompts, or the one that loads them from it, which is given that one."""

    def __init__(self, engine: FakeEngine, producer: FakeEngine | None = None) -> None:
        self.thing = engine
        self._producer = producer

    def exchange(self, content: object, timeout: float | None) -> int:
        """Compute a prompt, hand it over, load it. Returns how many tokens came."""
        prefill, decode, number = self._producer, self.thing, next(_numbers)
        if prefill is None:
            return 0
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

    def check(self, content: object, received: int) -> None:
        loads = any(self.exchange(content, None) for _ in range(_TRIES))
        assert loads or self._producer is None, "nothing is loaded any more, though there is enough again"

    def close(self, timeout: float | None) -> None:
        """Engines end with the attempt, after the check."""


class ConnectorEnds(Ends):
    """A producer and a consumer in this process."""

    roles: ClassVar[Sequence[str]] = ("producer", "consumer")
    may_break = ()
    suite: ConnectorSuite

    def offer(self) -> None:
        self._producer = self._engine("producer")

    def accept(self) -> End:
        return EngineEnd(self._producer)

    def connect(self, role: int, contact: None) -> End:
        decode = self._engine("consumer")
        sides = (decode.scheduler, decode.worker)  # one of them may only run out of time
        waiting = [partial(side.wait_until_ready, self.timeout_s) for side in sides]
        exhaustion.together(*waiting, within=4 * self.timeout_s)
        return EngineEnd(decode, self._producer)

    def _engine(self, role: str) -> FakeEngine:
        config = self.suite.config_of(role, timeout_s=_TIMEOUT_S, connect_timeout_s=_TIMEOUT_S)
        engine = FakeEngine(config, make=self.suite.make_side)
        self.suite.later(engine.worker.shutdown)
        self.suite.later(engine.scheduler.shutdown)
        return engine

    def content(self, role: int, number: int) -> Any:
        return None


class Exhaustion(ConnectorSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    def ends(self, **context: Any) -> ConnectorEnds:
        return ConnectorEnds(self, context)
