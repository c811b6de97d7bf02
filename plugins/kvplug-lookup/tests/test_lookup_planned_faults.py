"""The connector "lookup" over the transport "faulty", as an operator's config names it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvplug import Config, ConfigError, HandshakeError
from kvplug_testing import peers
from kvplug_testing.engine import FakeEngine, request_of

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 10.0
BASE: dict[str, Any] = {"connector": "lookup", "timeout_s": TIMEOUT_S, "connect_timeout_s": 20}
PROMPT = range(100)
KV = {"min_bytes": 4096}
"""Layers of 100 tokens are larger, and requests, headers and token ids are not."""


def config(role: str, *rules: dict[str, Any], inner: str = "auto", seed: int = 1, **more: Any) -> Config:
    """Without rules: a config that knows nothing of faults."""
    faulty = {"transport": "faulty", "options": {"faulty": {"inner": inner, "plan": plan(rules, seed)}}}
    return Config.from_dict({**BASE, "role": role, **(faulty if rules else {}), **more})


def plan(rules: Any, seed: int = 1) -> dict[str, Any]:
    return {"seed": seed, "rules": list(rules)}


@pytest.fixture(autouse=True, scope="module")
def warm_up() -> None:
    """torch makes threads of its own with its first large operation, and keeps them."""
    torch.ones(1 << 20).add_(1)


@contextlib.contextmanager
def pair(producer: Config, consumer: Config) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with (
        peers.nothing_left(),
        FakeEngine(producer, listen="unix:", seed=1) as prefill,
        FakeEngine(consumer, connect=prefill.worker.contact, seed=2) as decode,
    ):
        yield prefill, decode


def loads(prefill: FakeEngine, decode: FakeEngine, name: str = "a") -> tuple[int, int, bool, Any]:
    """Tokens promised, blocks that failed, whether what is loaded is right, and failures by reason."""
    prompt = request_of(name, PROMPT)
    blocks, loaded, report = decode.load(prompt)
    right = decode.is_right(prompt.token_ids, blocks, loaded)
    figures = decode.figures() or {}
    return loaded, len(report.invalid_block_ids), right, figures.get("failures", {}).get("load", {})


@pytest.mark.parametrize("inner", ["auto", "cpu"])
@pytest.mark.parametrize("there", ["at the producer", "at the consumer", "at both ends"])
def test_a_plan_that_hits_nothing_changes_nothing_wherever_it_is(inner: str, there: str) -> None:
    never = {"do": "drop", "message": 1 << 40}
    ours = [] if there == "at the consumer" else [never]
    theirs = [] if there == "at the producer" else [{**never, "direction": "recv"}]
    with pair(config("producer", *ours, inner=inner), config("consumer", *theirs, inner=inner)) as (
        prefill,
        decode,
    ):
        prefill.prefill(request_of("stored", PROMPT))
        assert loads(prefill, decode) == (96, 0, True, {})


@pytest.mark.parametrize(
    ("role", "direction"), [("producer", "send"), ("consumer", "recv")], ids=["sent", "received"]
)
def test_one_bit_is_found_counted_and_the_prompt_computed_again(role: str, direction: str) -> None:
    flip = {"do": "flip", "direction": direction, "message": 4, **KV}
    ends = [config(each, *([flip] if each == role else [])) for each in ("producer", "consumer")]
    with pair(*ends) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        loaded, failed, _, reasons = loads(prefill, decode)
        assert (loaded, failed, reasons) == (96, 6, {"corrupt": 1})
        prompt = request_of("b", PROMPT)
        assert decode.matched(prompt) in ((0, False), (96, False))
        blocks = decode.allocate(100)
        decode.step([(prompt, blocks, 0, 100)])
        assert decode.is_right(prompt.token_ids, blocks, 100)


def test_without_integrity_one_bit_goes_unseen() -> None:
    flip = {"do": "flip", "message": 4, **KV}
    ends = (config("producer", flip, integrity="off"), config("consumer", integrity="off"))
    with pair(*ends) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        assert loads(prefill, decode) == (96, 0, False, {})


def test_a_peer_that_is_gone_after_so_many_bytes_is_a_load_error_and_the_next_load_succeeds() -> None:
    """Of each link the first pipe is for signals, the second for KV: the third and fourth have no fault."""
    gone = {"do": "disconnect", "pipe": 2, "after": "20 KiB"}
    with pair(config("producer", gone), config("consumer")) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        begun = time.monotonic()
        loaded, failed, _, reasons = loads(prefill, decode)
        assert (loaded, failed, reasons) == (96, 6, {"peer_gone": 1})
        assert time.monotonic() - begun < TIMEOUT_S
        limit = time.monotonic() + 20
        while not decode.matched(request_of(f"ask {time.monotonic()}", PROMPT))[0]:
            assert time.monotonic() < limit, "the connector never found its peer again"
            time.sleep(0.05)
        assert loads(prefill, decode, "b") == (96, 0, True, {})


def test_a_message_that_never_comes_is_a_load_error_once_the_load_has_stalled() -> None:
    with pair(config("producer", {"do": "stop", "message": 3, **KV}), config("consumer")) as (
        prefill,
        decode,
    ):
        prefill.prefill(request_of("stored", PROMPT))
        begun = time.monotonic()
        loaded, failed, _, reasons = loads(prefill, decode)
        assert (loaded, failed, reasons) == (96, 6, {"stalled": 1})
        assert time.monotonic() - begun < TIMEOUT_S


def test_a_slow_peer_only_takes_its_time() -> None:
    with pair(config("producer", {"do": "slow", "bytes_per_s": "100 kB"}), config("consumer")) as (
        prefill,
        decode,
    ):
        prefill.prefill(request_of("stored", PROMPT))
        begun = time.monotonic()
        assert loads(prefill, decode) == (96, 0, True, {})
        assert time.monotonic() - begun > 0.2


@pytest.mark.parametrize("do", ["drop", "duplicate", "swap"])
def test_a_layer_that_is_lost_or_in_anothers_place_is_found_out(do: str) -> None:
    with pair(config("producer", {"do": do, "message": 3, **KV}), config("consumer")) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        loaded, failed, _, reasons = loads(prefill, decode)
        assert (loaded, failed, reasons) == (96, 6, {"corrupt": 1})


def test_ends_with_different_inner_transports_refuse_each_other_by_name() -> None:
    from kvplug import connect_pipe, listen_pipe

    listening = Config.from_dict(
        {**BASE, "transport": "faulty", "options": {"faulty": {"inner": "cpu", "plan": {}}}}
    )
    calling = Config.from_dict(
        {**BASE, "transport": "faulty", "options": {"faulty": {"inner": "memory", "plan": {}}}}
    )
    with (
        listen_pipe(listening, "unix:") as server,
        pytest.raises(HandshakeError, match="ours 'memory', theirs 'cpu'"),
    ):
        connect_pipe(calling, server.contact)


def test_a_bad_plan_is_refused_before_anything_is_built() -> None:
    bad = config("producer", {"do": "delay"}, {"do": "flop"}, inner="nothing-such")
    with pytest.raises(ConfigError) as caught:
        FakeEngine(bad, listen="unix:")
    keys = [fault.partition(": ")[0] for fault in caught.value.faults]
    assert sorted(keys) == ["options.faulty.inner", "options.faulty.plan", "options.faulty.plan"]
