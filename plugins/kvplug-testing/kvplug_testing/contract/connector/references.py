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

_dialled: list[list[Any]] = []
_is_listening = False

Path = tuple[Any, ...]


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        for each in _dialled:
            each.append(args[1])


@contextmanager
def dialled() -> Iterator[list[Any]]:
    """Addresses that this process connects to while the block runs."""
    global _is_listening
    if not _is_listening:
        sys.addaudithook(_hear)  # an audit hook cannot be removed
        _is_listening = True
    found: list[Any] = []
    _dialled.append(found)
    try:
        yield found
    finally:
        _dialled.remove(found)


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
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, value + 1000, -value - 1, 0 if value else 2, 1 << 62, float(value))
        yield from (value ^ 1 << bit for bit in range(0, 40, 3))
    elif isinstance(value, str):
        for at in range(len(value)):  # bit by bit
            for bit in range(0, 7, 3):
                yield value[:at] + chr(ord(value[at]) ^ 1 << bit) + value[at + 1 :]
        yield from (value.upper() + "x", value + " ", value[:-1], "", "\ud800", "é" * len(value))
    elif isinstance(value, bytes):
        for at in range(len(value)):
            for bit in range(8):
                yield value[:at] + bytes([value[at] ^ 1 << bit]) + value[at + 1 :]
        yield value + b"\0"
        yield value[:-1]
    yield from (None, [], {}, [value], {"a": value}, b"", 2**63, -1.5, float("nan"))


class References(ConnectorSuite):
    """A valid reference, and changed copies of it."""

    def _lent(self, **consumer: Any) -> tuple[FakeEngine, FakeEngine, dict[str, Any]]:
        prefill, decode = self.pair(num_blocks=64, consumer=consumer)
        params = self.stored(prefill)
        if not params:
            pytest.skip(f"{self.called} hands out no references: request_finished returned no params")
        return prefill, decode, params

    def _is_a_miss(self, decode: FakeEngine, name: str, params: Any, what: str) -> None:
        prompt = request_of(name, range(100), params=params)
        with dialled() as addresses:
            asked = Call(lambda: decode.matched(prompt)).end()
        assert asked.error is None, f"{what}: {asked.error!r} instead of a miss"
        assert asked.value[0] == 0, f"{what}: {asked.value[0]} tokens are promised"
        assert not addresses, f"{what}: {addresses} were dialled"
        decode.scheduler.request_finished(prompt, ((),), "aborted")

    _counted = 0

    def _misses(self, decode: FakeEngine) -> int:
        for side in (decode.scheduler, decode.worker):
            said = side.get_stats()
            self._counted += sum(failed(said, op) for op in ("match", "load", "other"))
        return self._counted

    @contextmanager
    def _counting(self, decode: FakeEngine, count: int, what: str) -> Iterator[None]:
        """At least so many misses are counted with a reason meanwhile."""
        before = self._misses(decode)
        yield
        now = self._misses(decode)
        assert now - before >= count, f"{what}: {count} misses, and {now - before} are counted with a reason"

    @law("REF-1", "REF-2")
    def test_one_that_is_good_is_good_in_another_engine_and_for_no_other_prompt(self) -> None:
        _, decode, params = self._lent()
        self.check_loads(decode, request_of("a", PROMPT, params=params), "a good reference gets nothing")
        found = self.num_promised(decode, request_of("b", range(5000, 5100), params=params))
        assert found == 0, f"{found} tokens of another prompt are promised"

    @law("REF-1")
    def test_one_of_an_earlier_start_of_its_engine_is_a_miss(self) -> None:
        prefill, decode, params = self._lent()
        with self._counting(decode, 2, "references of earlier starts"):
            for name in "ab":
                self.shut(prefill)
                prefill = self.engine("producer", seed=1, config={"engine_id": "the-same"})
                again = self.stored(prefill)
                self._is_a_miss(decode, name, params, "a reference of an earlier start of this engine")
                params = again

    @law("REF-1")
    def test_one_of_another_engine_is_a_miss(self) -> None:
        prefill, decode, params = self._lent()
        self.shut(prefill)
        fresh = self.stored(self.engine("producer", seed=1))
        with self._counting(decode, 1, "a reference of another engine"):
            self._is_a_miss(decode, "a", params, "a reference of another engine")
        assert self.num_promised(decode, request_of("b", PROMPT, params=fresh)), (
            "the engine's own reference is good, and a miss"
        )

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
        self.check_loads(
            decode, request_of("b", PROMPT, params=again), "the later generation's reference gets nothing"
        )

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
