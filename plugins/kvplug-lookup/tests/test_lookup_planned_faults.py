"""The connector "lookup" over the transport "faulty", as a config names it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvplug import Config
from kvplug_testing import peers
from kvplug_testing.engine import FakeEngine, request_of
from lookup_engines import PROMPT, config, failures, until_promised

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 10.0
KV = "min_bytes=4096"
"""Pages are larger, and requests are not."""


def faulty(role: str, *rules: str, **more: Any) -> Config:
    """Without rules: a config that knows nothing of faults."""
    options: dict[str, Any] = {"host": {"segment_bytes": 1 << 20, "map": False}}
    if rules:
        options["faulty"] = {"rules": list(rules)}
        more["transport"] = "faulty"
    return config(role, options=options, **more)


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
        prefill.prefill(request_of("stored", PROMPT))
        yield prefill, decode


def loads(decode: FakeEngine, name: str = "a") -> tuple[int, int, bool, dict[str, int]]:
    """Tokens promised, blocks that failed, whether what is loaded is right, and failures by reason."""
    prompt = request_of(name, PROMPT)
    blocks, loaded, report = decode.load(prompt)
    right = decode.is_right(prompt.token_ids, blocks, loaded)
    return loaded, len(report.invalid_block_ids), right, failures(decode, "load")


def test_one_bit_is_found_counted_and_the_prompt_computed_again() -> None:
    with pair(faulty("producer", f"flip message=1 {KV}"), faulty("consumer")) as (_, decode):
        loaded, failed, _, reasons = loads(decode)
        assert loaded == 96 and failed >= 1 and reasons == {"corrupt": 1}
        prompt = request_of("b", PROMPT)
        blocks = decode.admit(prompt)
        decode.step([(prompt, blocks, 0, 100)])
        assert decode.is_right(prompt.token_ids, blocks, 100)


def test_without_integrity_one_bit_goes_unseen() -> None:
    flip = f"flip message=1 {KV}"
    with pair(faulty("producer", flip, integrity="off"), faulty("consumer", integrity="off")) as (_, decode):
        assert loads(decode) == (96, 0, False, {})


def test_a_peer_that_is_gone_with_the_pages_is_a_load_error_and_the_next_load_succeeds() -> None:
    gone = f"disconnect pipe=1 message=1 {KV}"
    with pair(faulty("producer", gone), faulty("consumer")) as (_, decode):
        begun = time.monotonic()
        loaded, failed, _, reasons = loads(decode)
        assert loaded == 96 and failed >= 1 and len(reasons) == 1, reasons
        assert time.monotonic() - begun < TIMEOUT_S
        until_promised(decode, PROMPT, 96)
        assert loads(decode, "b") == (96, 0, True, {})


def test_a_message_that_never_comes_is_a_load_error_once_the_load_has_stalled() -> None:
    with pair(faulty("producer", f"stop message=1 {KV}"), faulty("consumer")) as (_, decode):
        begun = time.monotonic()
        loaded, failed, _, reasons = loads(decode)
        assert loaded == 96 and failed >= 1 and reasons == {"stalled": 1}
        assert time.monotonic() - begun < TIMEOUT_S / 2


def test_a_slow_peer_only_takes_its_time() -> None:
    with pair(faulty("producer", "slow bytes_per_s=100000"), faulty("consumer")) as (_, decode):
        begun = time.monotonic()
        assert loads(decode) == (96, 0, True, {})
        assert time.monotonic() - begun > 0.2


@pytest.mark.parametrize("do", ["drop", "duplicate", "swap"])
def test_a_piece_that_is_lost_or_in_anothers_place_is_never_taken_for_the_right_one(do: str) -> None:
    with pair(faulty("producer", f"{do} message=1 {KV}"), faulty("consumer")) as (_, decode):
        prompt = request_of("a", PROMPT)
        blocks, loaded, report = decode.load(prompt)
        assert loaded == 96
        wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, 96)
        assert wrong <= report.invalid_block_ids
        assert bool(failures(decode, "load")) == bool(report.invalid_block_ids)
