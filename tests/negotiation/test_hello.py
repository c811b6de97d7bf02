"""A Hello as plain values, and what a peer may send instead."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.errors import HandshakeError
from kvplug.negotiation.hello import EngineFacts, Hello, hello_from
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import Offer
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire import decode, encode, to_plain
from kvplug.transport.capabilities import Capabilities
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
                cost=Capabilities.Cost(latency_us=7, gb_per_s=2.5),
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


ENGINE = to_plain(FULL)["engine"]


@pytest.mark.parametrize("hello", [FULL, PIPE], ids=["full", "pipe"])
def test_a_hello_crosses_the_wire_unchanged(hello: Hello) -> None:
    assert hello_from(decode(encode(to_plain(hello)))) == hello


def test_keys_of_a_newer_minor_version_are_passed_over() -> None:
    plain = to_plain(FULL)
    plain["colour"] = "blue"
    plain["engine"]["model"]["depth"] = [1]
    plain["transports"][0]["weight"] = {"kg": 3}
    assert hello_from(plain) == FULL


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
    for path in leaves(to_plain(FULL))[1:]:
        try:
            found = hello_from(planted(to_plain(FULL), path, value))
        except HandshakeError as e:
            (reason,) = e.reasons
            assert reason.startswith(f"hello.{path[0]}"), (path, reason)
        else:
            assert hello_from(to_plain(found)) == found


def test_a_field_that_is_missing_and_has_no_default_is_named() -> None:
    for outer, key in ((), "identity"), (("engine",), "block_size"), (("engine", "model"), "dtype"):
        plain = to_plain(FULL)
        inner = plain
        for name in outer:
            inner = inner[name]
        del inner[key]
        with pytest.raises(HandshakeError) as refusal:
            hello_from(plain)
        where = ".".join(("hello", *outer))
        assert refusal.value.reasons == (f"{where}: Object missing required field `{key}`",)


@pytest.mark.parametrize("plain", [None, 5, [], "hello", b"", (1, 2)])
def test_what_is_no_mapping_is_no_hello(plain: Any) -> None:
    with pytest.raises(HandshakeError, match="hello: Expected `object`"):
        hello_from(plain)


def test_two_offers_of_one_name_are_refused() -> None:
    plain = to_plain(FULL)
    plain["transports"] = [*plain["transports"], plain["transports"][0]]
    with pytest.raises(HandshakeError, match="hello: transports contains a name twice"):
        hello_from(plain)
