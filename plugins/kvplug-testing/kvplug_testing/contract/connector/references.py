"""References that travel through clients' requests, valid and invalid ones (laws REF-1 and REF-2)."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import attrs
import pytest

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite, failed
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call


def forged(value: Any) -> Iterator[Any]:
    """Values close to this one, and values of the wrong type."""
    if isinstance(value, int):
        yield from (value + 1, value - 1, -value - 1, value ^ 1 << 33, 1 << 62, float(value))
    elif isinstance(value, str):
        yield from (value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :] for at in range(len(value)))
        yield from (value.upper() + "x", value + " ", value[:-1], "", "\ud800")
    elif isinstance(value, bytes):
        for at in range(len(value)):
            for bit in range(8):
                yield value[:at] + bytes([value[at] ^ 1 << bit]) + value[at + 1 :]
        yield from (value + b"\0", value[:-1])
    yield from (None, [], {}, [value], {"a": value}, b"", 2**63, -1.5, float("nan"))


def changed(value: Any, other: Any) -> Iterator[tuple[str, Any]]:
    """Copies with one leaf changed, each with what is changed. ``other``: another valid value."""
    if isinstance(value, dict):
        for key, each in value.items():
            for what, made in changed(each, other.get(key)):
                yield f"{key}.{what}", {**value, key: made}
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            for what, made in changed(each, other[index] if index < len(other) else each):
                yield f"{index}.{what}", [*value[:index], made, *value[index + 1 :]]
    else:
        for made in (*forged(value), other):
            if type(made) is not type(value) or made != value:
                yield f" is {made!r:.80} in the place of {value!r:.80}", made


class References(ConnectorSuite):
    """A valid reference, and changed copies of it."""

    def _lent(self) -> tuple[FakeEngine, FakeEngine, dict[str, Any]]:
        prefill, decode = self.pair()
        params = self.stored(prefill)
        if not params:
            pytest.skip(f"{self.called} hands out no references: request_finished returned no params")
        params.pop("traceparent", None)  # not of the reference, and any value of it is allowed
        return prefill, decode, params

    def _is_a_miss(self, decode: FakeEngine, params: Any, what: str, name: str = "a") -> None:
        """Also one that is counted with a reason."""
        prompt = request_of(name, range(100), params=params)
        self._num_misses(decode)
        with mock.patch.object(socket.socket, "connect", autospec=True) as dials:
            asked = Call(lambda: decode.matched(prompt)).end()
        assert asked.error is None, f"{what}: {asked.error!r} instead of a miss"
        assert asked.value[0] == 0, f"{what}: {asked.value[0]} tokens are promised"
        assert not dials.called, f"{what}: an address was dialled: {dials.call_args}"
        assert self._num_misses(decode), f"{what}: no miss is counted with a reason"
        decode.scheduler.request_finished(prompt, ((),), "aborted")

    @staticmethod
    def _num_misses(decode: FakeEngine) -> int:
        """How many misses are counted with a reason since the last call."""
        found = [side.get_stats() for side in (decode.scheduler, decode.worker)]
        return sum(failed(stats, op) for stats in found for op in ("match", "load", "other"))

    @law("REF-1")
    @pytest.mark.parametrize("engine_id", ["", "the-same"])
    def test_a_reference_of_an_earlier_engine_is_a_miss(self, engine_id: str) -> None:
        """Another engine, or an earlier start of the same one."""
        prefill, decode, params = self._lent()
        config = {"engine_id": engine_id} if engine_id else {}
        if engine_id:
            self.shut(prefill)
            prefill = self.engine("producer", seed=1, config=config)
            params = self.stored(prefill)
        self.shut(prefill)
        fresh = self.stored(self.engine("producer", seed=1, config=config))
        self.until_promised(decode, request_of("b", PROMPT, params=fresh))  # the engine's own is good
        self._is_a_miss(decode, params, "a reference of an engine that was there before")

    @law("REF-1", "REF-2")
    def test_a_reference_is_valid_for_its_own_prompt_until_that_is_computed_again_or_it_expires(self) -> None:
        prefill, decode, params = self._lent()
        self.check_loads(decode, request_of("a", PROMPT, params=params), "a good reference gets nothing")
        found = self.num_promised(decode, request_of("b", range(5000, 5100), params=params))
        assert found == 0, f"{found} tokens of another prompt are promised"
        prompt = attrs.evolve(request_of("stored", PROMPT), generation=1)
        _, again = self.run(prefill.hand_off, prompt)
        self._is_a_miss(decode, params, "a reference of an earlier generation of its request", "c")
        later = request_of("d", PROMPT, params=again)
        self.check_loads(decode, later, "the later generation's reference gets nothing")
        unused = self.stored(prefill, name="unused")
        with mock.patch.object(time, "time", return_value=time.time() + 10 * 365 * 86400):
            self._is_a_miss(decode, unused, "a reference of ten years ago", "e")
        self.check_loads(decode, request_of("f", PROMPT, params=unused), "it is refused within its time, too")

    @law("REF-2")
    def test_a_reference_in_which_anything_was_changed_is_a_miss(self) -> None:
        """Some values are those of another valid reference."""
        prefill, decode, params = self._lent()
        forgeries = [*changed(params, self.stored(prefill, range(1000, 1050), "other"))]
        assert len(forgeries) > 50, f"params of {len(forgeries)} places hold no ticket: {params!r:.200}"
        for number, (what, forgery) in enumerate(forgeries):
            self._is_a_miss(decode, forgery, what, f"r{number}")
