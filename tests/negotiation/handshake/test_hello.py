"""A Hello as plain values, and what a peer may send instead."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.errors import HandshakeError
from kvplug.negotiation.handshake.hello import EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import Offer
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire.values import decode, encode
from kvplug.transport.capabilities import Capabilities, Cost
from kvplug.transport.spec import Probe

FULL = Hello(
    purpose="entries",
    engine=EngineFacts(
        role="consumer",
        model=ModelInfo(name="m", num_layers=30, num_kv_heads=3, head_size=64, dtype="float32", window=4096),
        layers=(0, 30),
        cache_layers=31,
        tensor_parallel_size=2,
        tensor_parallel_rank=1,
        layout="KBTHD",
        block_size=16,
        rank=1,
        world_size=2,
    ),
    checksums=("xxh3_64",),
    requested_transport="net",
    transports=(
        Offer(
            name="net",
            protocol=3,
            capabilities=Capabilities(
                devices={"cpu", "cuda"},
                cross_host=True,
                authenticated=False,
                receive_into=False,
                full_duplex=False,
                max_dims=8,
                cost=Cost(latency_us=7, gb_per_s=2.5),
            ),
            probe=Probe(viable=False, reason="no such device", domain="boot/net"),
        ),
        Offer(name="other"),
    ),
    device="cuda",
    require_authenticated=True,
    engine_id="e1",
    epoch="abc",
    identity=PeerIdentity(boot_id="b", pid_ns="p", net_ns="n", pid=7, start_time=9, host="h", label="l"),
    versions={"kvplug": "0.1.0"},
)
PIPE = Hello(identity=PeerIdentity(pid=1))


ENGINE = FULL.to_plain()["engine"]


@pytest.mark.parametrize("hello", [FULL, PIPE], ids=["full", "pipe"])
def test_a_hello_crosses_the_wire_unchanged(hello: Hello) -> None:
    assert Hello.from_plain(decode(encode(hello.to_plain()))) == hello


def test_keys_of_a_newer_minor_version_are_passed_over() -> None:
    plain = FULL.to_plain()
    plain["colour"] = "blue"
    plain["engine"]["model"]["depth"] = [1]
    plain["transports"][0]["weight"] = {"kg": 3}
    assert Hello.from_plain(plain) == FULL


def leaves(plain: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    return [path, *(leaf for key, value in items for leaf in leaves(value, (*path, key)))]


def planted(plain: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(plain) if isinstance(plain, dict) else list(plain)
    copy[path[0]] = planted(copy[path[0]], path[1:], value)
    return copy


ODD = [
    *(None, True, -1, 0, 2**63, 2**64 - 1, 0.0, -1.0, float("nan"), float("inf"), 1e-320),
    *("", "x" * 2000, "line\nbreak", b"", b"x", [], [None] * 3, ["x"] * 100, {}, {"x": 1}, (), set()),
]


@pytest.mark.parametrize("value", ODD, ids=lambda v: ascii(v)[:20])
def test_anything_in_any_place_is_a_hello_or_a_handshake_error_that_names_it(value: Any) -> None:
    for path in leaves(FULL.to_plain())[1:]:
        try:
            Hello.from_plain(planted(FULL.to_plain(), path, value))
        except HandshakeError as e:
            reasons = e.reasons
        else:
            continue
        assert all(reason.startswith(path[0]) for reason in reasons), (path, reasons)


OPTIONAL = {"engine", "engine.layers", "engine.cache_layers", "engine.tensor_parallel_rank"}


def test_a_field_that_is_missing_is_named() -> None:
    paths = [*((key,) for key in FULL.to_plain()), *(("engine", key) for key in ENGINE)]
    for *outer, key in paths:
        field = ".".join([*outer, key])
        if field in OPTIONAL:
            continue
        plain = FULL.to_plain()
        del (plain["engine"] if outer else plain)[key]
        with pytest.raises(HandshakeError) as refusal:
            Hello.from_plain(plain)
        assert any(reason.startswith(field) for reason in refusal.value.reasons), field


def test_what_is_no_mapping_is_one_fault_and_all_faults_of_a_mapping_are_told_at_once() -> None:
    several = {**FULL.to_plain(), "engine": {**ENGINE, "rank": "1", "block_size": 0}, "device": None}
    faults = [(plain, ["hello"]) for plain in (None, 5, [], "hello", b"", (1, 2))]
    for plain, fields in [*faults, (several, ["engine.block_size", "engine.rank", "device"])]:
        with pytest.raises(HandshakeError) as refusal:
            Hello.from_plain(plain)
        assert [reason.partition(":")[0] for reason in refusal.value.reasons] == fields
