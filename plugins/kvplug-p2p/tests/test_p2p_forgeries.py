"""References that clients have forged, altered, kept too long or used before, by the thousand."""

from __future__ import annotations

import copy
import json
import random
import socket
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest

from kvplug.engine import RequestEnd
from kvplug_testing.engine import FakeEngine, request_of
from p2p_engines import PROMPT, at, failures, failures_of, leaves, loaded, pair, put, stored, until_named

REASONS = {
    "altered": {"forged", "identity", "refused"},
    "swapped": {"forged", "identity"},
    "names another": {"refused"},
    "garbage": {"forged"},
    "expired": {"expired"},
    "replayed": {"gone"},
}


def made(chance: random.Random, kind: str, good: Any, other: Any, dialled: list[str]) -> dict[str, Any]:
    """One of this kind. ``dialled``: addresses at which a listener counts."""
    params: dict[str, Any] = copy.deepcopy(good)
    if kind == "names another":
        address = chance.choice(dialled)
        put(params, ("remote_engine_id",), f"engine-{chance.randrange(9)}")
        put(params, ("kvplug", "address"), address)
        put(params, ("remote_host",), address.rpartition(":")[0])
    elif kind == "garbage":
        params["kvplug"] = chance.choice([None, [], {}, 7, "x", {"epoch": 1}, params["kvplug"]["ticket"]])
    elif kind == "swapped":
        places = [place for place in leaves(other) if at(params, place) != at(other, place)]
        put(params, place := chance.choice(places), at(other, place))
    elif kind == "altered":
        place = chance.choice(leaves(params))
        value = at(params, place)
        near: list[Any] = [None, [], {}, "", 0, -1, 1 << 62, 1.5, float("nan"), chance.choice(dialled)]
        near += [value + 1, -value - 1] if type(value) is int else [f"{value}0", str(value)[1:]]
        near = [each for each in near if json.dumps(each) != json.dumps(value)]
        put(params, place, chance.choice(near))
    return params


@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_every_one_is_a_miss_of_its_reason_and_nothing_else_is_dialled(count: int) -> None:
    chance = random.Random(7)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("")
        unix.listen()
        dialled = [f"127.0.0.1:{tcp.getsockname()[1]}", f"unix:@{unix.getsockname()[1:].decode()}"]
        with pair({"allowed": ["10.0.7.*:29555"], "lease_s": 600.0}) as (prefill, decode):
            replayed = stored(prefill, "replayed")
            assert loaded(decode, request_of("reader", PROMPT, params=replayed)) == 96
            until_named(prefill, "replayed")
            good, other = stored(prefill), stored(prefill, "other", range(1000, 1100))
            with mock.patch.object(time, "time", return_value=time.time() - 3600):
                expired = stored(prefill, "expired")
            for params in (replayed, good, other, expired):
                del params["traceparent"]  # not of the reference, and any value of it is allowed
            decode.figures()
            found: dict[str, Counter[str]] = {kind: Counter() for kind in REASONS}
            began = time.monotonic()
            for number in range(count):
                kind = chance.choice([*REASONS])
                given = {"expired": expired, "replayed": replayed}.get(kind, good)
                found[kind] += ask(decode, number, made(chance, kind, given, other, dialled))
            took = time.monotonic() - began
            print(f"{count} references in {took:.1f} s: {found}")
            for kind, reasons in found.items():
                assert reasons.keys() <= REASONS[kind], (kind, reasons)
            assert sum(reasons.total() for reasons in found.values()) == count
            assert decode.step([]) and not failures_of(decode, "load")
            assert len(decode.scheduler.links) == 1
            for listener in (tcp, unix):
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.accept()
            assert loaded(decode, request_of("a", PROMPT, params=good)) == 96, "the good one is spoilt"
            until_named(prefill, "stored")


def ask(decode: FakeEngine, number: int, params: dict[str, Any]) -> Counter[str]:
    """Returns why it is a miss."""
    prompt = request_of(f"r{number}", PROMPT, params=params)
    assert decode.matched(prompt) == (0, False), params
    decode.scheduler.request_finished(prompt, ((),), RequestEnd.ABORTED)
    return Counter(failures(decode.scheduler, "match"))
