"""The engines of a connector, for the general laws."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import attrs

from kvplug import ClosedError, Config
from kvplug.engine import Request
from kvplug.transport import Deadline
from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite, Promise
from kvplug_testing.contract.ends import Calls, End, Ends, Outcome
from kvplug_testing.contract.general import General
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.tampering.relay import Relay

_TIMEOUT_S: Final = 2.0
"""``timeout_s`` of the engines."""
_numbers: Final = itertools.count(1)


class _Ends(End):
    """Engines that end together."""

    gone = None
    _is_ended = False

    def __init__(self, *engines: FakeEngine) -> None:
        self._engines = engines

    def close(self, timeout: float | None) -> None:
        self._shut("worker", "scheduler")

    def abort(self) -> None:
        self._shut("scheduler", "worker")

    def _shut(self, *sides: str) -> None:
        self._is_ended = True
        for engine in self._engines:
            for side in sides:
                getattr(engine, side).shutdown()

    def closed(self) -> bool | None:
        return self._is_ended or None


class EnginesEnd(_Ends):
    """An engine that computes prompts, and one that loads them from it. They are one end: what one hands over
    goes to the other through its engine, and not through the connector.
    """

    role = "engines"

    def __init__(self, suite: ConnectorSuite, prefill: FakeEngine, decode: FakeEngine) -> None:
        super().__init__(decode, prefill)
        self._prefill, self._decode = prefill, decode
        self._forgets_in_children = suite.across_processes
        self._pid = os.getpid()
        self._loaded: Request | None = None
        """What was handed over last."""

    def exchange(self, content: range, timeout: float | None) -> int:
        """Returns how many tokens were loaded. A load that fails is tried again."""
        deadline = Deadline.after(timeout)
        while not (found := self._hand_over(content)):
            if self._is_ended:
                raise ClosedError("the engines are shut down")
            if deadline.expired:
                raise exhaustion.ResultError("no load succeeds")
        return found

    def _hand_over(self, tokens: range) -> int:
        """Compute a prompt, hand it off and load it. Returns how many tokens were loaded."""
        number, prefill, decode = next(_numbers), self._prefill, self._decode
        blocks, params = prefill.hand_off(request_of(f"given {number}", tokens))
        prefill.free_blocks.extend(blocks)
        self._loaded = prompt = request_of(f"taken {number}", tokens, params=params)
        found, is_async = decode.matched(prompt)
        assert 0 <= found <= len(tokens), f"{found} of {len(tokens)} tokens are promised"
        load = Promise(decode, prompt, decode.allocate(len(tokens)), found, is_async)
        decode.scheduler.update_state_after_alloc(prompt, (load.blocks,), found)
        reports = [decode.step([] if is_async else [load.work])]
        while is_async and prompt.request_id not in reports[-1].finished_recving:
            reports.append(decode.step([]))
        has_failed = load.check_reported(*reports)
        load.check_computes_again()
        decode.finish(prompt, load.blocks)
        decode.free_blocks.extend(load.blocks)
        return 0 if has_failed else found

    def check(self, content: range, received: int) -> None:
        """The KV was checked in the blocks."""
        assert received, "nothing was loaded"

    def not_closed(self, timeout: float | None = 0.5) -> str:
        """An engine calls nothing after ``shutdown``; a forked child promises nothing that its parent has."""
        found = 0
        if self._forgets_in_children and self._loaded and os.getpid() != self._pid:
            with contextlib.suppress(ClosedError):
                found, _ = self._query(self._loaded)
        return f"{found} tokens are promised in a forked child" if found else ""

    def busy(self, leaves: bool) -> None:
        self.part(0, None)
        while self._loaded:
            self._query(self._loaded)

    def _query(self, prompt: Request) -> tuple[int, bool]:
        return self._decode.matched(attrs.evolve(prompt, request_id=f"query {next(_numbers)}"))

    def timed(self) -> Calls:
        return {}


class LonelyEnd(_Ends):
    """An engine whose peer never comes."""

    role = "lonely"

    def __init__(self, engine: FakeEngine, address: str) -> None:
        """``address``: where its peer would be."""
        super().__init__(engine)
        self.awaits = address

    @functools.cached_property
    def _waiting(self) -> Calls:
        """Those that wait for a peer at all."""
        (engine,) = self._engines
        sides = {"scheduler": engine.scheduler, "worker": engine.worker}
        calls = {f"wait_until_ready of the {name}": side.wait_until_ready for name, side in sides.items()}
        return {name: call for name, call in calls.items() if Outcome.of(partial(call, timeout=0)).kinds}

    def calls(self) -> Calls:
        return self._waiting

    blocking = timed = calls


class ConnectorEnds(Ends):
    """A pair of engines, and a lonely one beside it. ``context``: ``timeout_s``, and a relay between them."""

    roles: ClassVar[Sequence[str]] = ("engines",)
    may_break = ()
    suite: ConnectorSuite

    def offer(self) -> None:
        self._producer = self._engine(self._config("producer"), 1)

    def accept(self) -> End:
        relay, ours = self.context.get("relay"), self._config("consumer")
        if relay is not None:
            theirs, ours = ours, self._config("consumer", host=f"{ours.host}-relayed")
            relay.stand_at(ours.control_address(), theirs.control_address())
        decode = self._engine(ours, 2)
        if relay is None:
            self._wait(decode)
        return EnginesEnd(self.suite, self._producer, decode)

    def _wait(self, decode: FakeEngine) -> None:
        """Both sides find the producer, at the same time: one of them may only run out of time."""
        calls = [partial(each.wait_until_ready, self.timeout_s) for each in (decode.scheduler, decode.worker)]
        exhaustion.together(*calls, within=4 * self.timeout_s)

    def connect(self, role: int, contact: None) -> End:
        raise NotImplementedError("both engines are of one end")

    def besides(self) -> list[End]:
        config = self._config("consumer", host=f"{self._config('consumer').host}-lonely")
        return [LonelyEnd(self._engine(config, 3), config.control_address())]

    def _config(self, role: str, **more: Any) -> Config:
        connect_timeout_s = self.context.get("timeout_s", _TIMEOUT_S)
        return self.suite.config_of(role, timeout_s=_TIMEOUT_S, connect_timeout_s=connect_timeout_s, **more)

    def _engine(self, config: Config, seed: int) -> FakeEngine:
        engine = FakeEngine(config, make=self.suite.make_side, seed=seed)
        self.suite.later(engine.worker.shutdown)
        self.suite.later(engine.scheduler.shutdown)
        return engine

    def content(self, role: int, number: int) -> range:
        return range(number * 1000, number * 1000 + len(PROMPT))


class ConnectorGeneral(ConnectorSuite, General):
    """The general laws for connectors."""

    lies = 20
    _lied_to_s = 1.0

    def warm_up(self) -> None:
        super().warm_up()
        exhaustion.together(bool, within=self.timeout_s)  # its threads stay

    def ends(self, **context: Any) -> ConnectorEnds:
        return ConnectorEnds(self, context)

    @property
    def other_processes(self) -> str:
        """Both engines of an end are in the same process, which may be any."""
        return ""

    def _lied_to(self, relay: Relay, timeout_s: float) -> Sequence[Callable[[], Any]]:
        """The messages that the engines exchange."""
        return [lambda: self.ends(relay=relay).make([None])[0]]
