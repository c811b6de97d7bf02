"""References that travel through clients' requests, valid and invalid ones (laws REF-1 and REF-2)."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.stats import failed
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call

_dialled: list[Any] = []
_is_listening = False

Path = tuple[Any, ...]


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        _dialled.append(args[1])


def dialled() -> list[Any]:
    """The addresses that this process connects to from now on, until the next call."""
    global _is_listening
    if not _is_listening:
        sys.addaudithook(_hear)  # an audit hook cannot be removed
        _is_listening = True
    _dialled.clear()
    return _dialled


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf value inside, with its path."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from leaves(each, (*path, index))
    else:
        yield path, value


def with_leaf(params: Any, path: Path, value: Any) -> Any:
    """A copy with another value at this path."""
    made = copy.deepcopy(params)
    at = made
    for step in path[:-1]:
        if isinstance(at[step], tuple):
            at[step] = list(at[step])
        at = at[step]
    at[path[-1]] = value
    return made


def forged(value: Any) -> Iterator[Any]:
    """Values close to this one, and values of the wrong type."""
    if isinstance(value, int):
        yield from (value + 1, value - 1, -value - 1, 0 if value else 2, 1 << 62, float(value))
        yield from (value ^ 1 << bit for bit in range(0, 40, 3))
    elif isinstance(value, str):
        yield from (value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :] for at in range(len(value)))
        yield from (value.upper() + "x", value + " ", value[:-1], "", "\ud800")
    elif isinstance(value, bytes):
        for at in range(len(value)):
            for bit in range(8):
                yield value[:at] + bytes([value[at] ^ 1 << bit]) + value[at + 1 :]
        yield from (value + b"\0", value[:-1])
    yield from (None, [], {}, [value], {"a": value}, b"", 2**63, -1.5, float("nan"))


class References(ConnectorSuite):
    """A valid reference, and changed copies of it."""

    def _lent(self) -> tuple[FakeEngine, FakeEngine, dict[str, Any]]:
        prefill, decode = self.pair(num_blocks=64)
        params = self.stored(prefill)
        if not params:
            pytest.skip(f"{self.called} hands out no references: request_finished returned no params")
        return prefill, decode, params

    def _is_a_miss(self, decode: FakeEngine, name: str, params: Any, what: str) -> None:
        prompt = request_of(name, range(100), params=params)
        addresses = dialled()
        asked = Call(lambda: decode.matched(prompt)).end()
        assert asked.error is None, f"{what}: {asked.error!r} instead of a miss"
        assert asked.value[0] == 0, f"{what}: {asked.value[0]} tokens are promised"
        assert not addresses, f"{what}: {addresses} were dialled"
        decode.scheduler.request_finished(prompt, ((),), "aborted")

    def _num_misses(self, decode: FakeEngine) -> int:
        """How many misses are counted with a reason since the last call."""
        found = [side.get_stats() for side in (decode.scheduler, decode.worker)]
        return sum(failed(stats, op) for stats in found for op in ("match", "load", "other"))

    @contextmanager
    def _counting(self, decode: FakeEngine, count: int, what: str) -> Iterator[None]:
        """At least so many misses are counted with a reason meanwhile."""
        self._num_misses(decode)
        yield
        found = self._num_misses(decode)
        assert found >= count, f"{what}: {count} misses, and {found} are counted with a reason"

    @law("REF-1", "REF-2")
    def test_one_that_is_good_is_good_in_another_engine_and_for_no_other_prompt(self) -> None:
        _, decode, params = self._lent()
        self.check_loads(decode, request_of("a", PROMPT, params=params), "a good reference gets nothing")
        found = self.num_promised(decode, request_of("b", range(5000, 5100), params=params))
        assert found == 0, f"{found} tokens of another prompt are promised"

    @law("REF-1")
    @pytest.mark.parametrize("engine_id", ["", "the-same"])
    def test_one_of_an_engine_that_was_there_before_is_a_miss(self, engine_id: str) -> None:
        """Another engine, or an earlier start of the same one."""
        prefill, decode, params = self._lent()
        config = {"engine_id": engine_id} if engine_id else {}
        if engine_id:
            self.shut(prefill)
            prefill = self.engine("producer", seed=1, config=config)
            params = self.stored(prefill)
        self.shut(prefill)
        fresh = self.stored(self.engine("producer", seed=1, config=config))
        with self._counting(decode, 1, "a reference of an engine that was there before"):
            self._is_a_miss(decode, "a", params, "a reference of an engine that was there before")
        assert self.num_promised(decode, request_of("b", PROMPT, params=fresh)), "the engine's own is a miss"

    @law("REF-1")
    def test_one_whose_lease_is_over_is_a_miss(self) -> None:
        prefill, decode, params = self._lent()
        if self.run(prefill.scheduler.reset_cache) is not True:
            pytest.skip(f"{self.called} cannot end a lease by reset_cache")
        with self._counting(decode, 1, "a reference whose lease is over"):
            self._is_a_miss(decode, "a", params, "a reference whose lease is over")

    @law("REF-1")
    def test_one_of_an_earlier_generation_of_its_request_is_a_miss(self) -> None:
        prefill, decode, params = self._lent()
        prompt = attrs.evolve(request_of("stored", PROMPT), generation=1)
        _, again = self.run(prefill.hand_off, prompt)
        with self._counting(decode, 1, "a reference of an earlier generation"):
            self._is_a_miss(decode, "a", params, "a reference of an earlier generation of its request")
        later = request_of("b", PROMPT, params=again)
        self.check_loads(decode, later, "the later generation's reference gets nothing")

    @law("REF-2")
    def test_one_whose_time_is_over_is_a_miss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, decode, params = self._lent()
        now = time.time
        with self._counting(decode, 1, "a reference of ten years ago"), monkeypatch.context() as later:
            later.setattr(time, "time", lambda: now() + 10 * 365 * 86400)
            self._is_a_miss(decode, "a", params, "a reference of ten years ago")

    @law("REF-2")
    def test_one_in_which_anything_was_changed_is_a_miss(self) -> None:
        """Also to what another good reference says there."""
        prefill, decode, params = self._lent()
        theirs = dict(leaves(self.stored(prefill, range(1000, 1050), "other")))
        changed = [
            (path, other, value)
            for path, value in leaves(params)
            for other in (*forged(value), *([theirs[path]] if path in theirs else []))
            if type(other) is not type(value) or other != value
        ]
        assert len(changed) > 50, f"params of {len(changed)} places hold no ticket: {params!r:.200}"
        with self._counting(decode, len(changed), "forged references"):
            for number, (path, other, value) in enumerate(changed):
                what = f"{'.'.join(map(str, path))} is {other!r:.80} in the place of {value!r:.80}"
                self._is_a_miss(decode, f"r{number}", with_leaf(params, path, other), what)
