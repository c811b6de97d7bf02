"""A producer that has proved its identity and lies to a consumer (law ALL-10).

The consumer reaches the producer through a relay. KV that is wrong afterwards must be in the report of its
step, as for any other fault.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from kvplug import KvplugError
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.contract.ends import Calls
from kvplug_testing.contract.lied_to import LiedTo
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.tampering.relay import Relay

_PROMPTS: Final = [(*range(50), *range(begin, begin + 50)) for begin in (50, 200, 300, 400)]
_numbers = itertools.count(1)


class LyingPeers(ConnectorSuite, LiedTo):
    """What a producer may say to a consumer."""

    lies = 20
    _lied_to_s = 1.0
    _params: Sequence[dict[str, Any]] = ()

    @property
    def lied_to_processes(self) -> str:
        return self.other_processes or super().lied_to_processes

    def _before_lies(self) -> None:
        prefill = self.engine("producer", seed=1)
        self._params = [self.stored(prefill, prompt, f"of {prompt[50]}") for prompt in _PROMPTS]

    def _lied_to(self, relay: Relay, timeout_s: float) -> Sequence[Callable[[], Any]]:
        theirs = self.config_of("producer")
        given: dict[str, Any] = {"timeout_s": timeout_s, "connect_timeout_s": timeout_s}
        ours = self.config_of("consumer", host=f"{theirs.host}-relayed", **given)
        relay.stand_at(ours.control_address(), theirs.control_address())
        make = partial(FakeEngine, ours, make=self.make_side, seed=2)
        return [lambda: _Consumer(self, make(), self._params)]


class _Consumer:
    """An engine that loads what the producer has stored, in the place of an :class:`.End`."""

    def __init__(self, suite: ConnectorSuite, engine: FakeEngine, params: Sequence[dict[str, Any]]) -> None:
        self._suite = suite
        self._engine = engine
        self._params = params

    def part(self, number: int, timeout: float) -> None:
        """Load what is promised of a prompt, and compute all of it."""
        for side in (self._engine.scheduler, self._engine.worker):
            with suppress(KvplugError):
                side.wait_until_ready(timeout)
        number %= len(_PROMPTS)
        request = request_of(f"loaded {next(_numbers)}", _PROMPTS[number], params=self._params[number])
        load = self._suite.admitted(self._engine, request)
        assert 0 <= load.found <= len(request.token_ids), f"{load.found} tokens were promised"
        self._suite.run_load(load)
        load.check_computes_again()
        self._engine.finish(request, load.blocks)

    def lied_to(self) -> Calls:
        return {}

    def close(self, timeout: float) -> None:
        self._engine.scheduler.shutdown()
        self._engine.worker.shutdown()
