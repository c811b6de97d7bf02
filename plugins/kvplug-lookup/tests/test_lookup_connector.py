"""The connector "lookup": what it refuses, and blocks that are not pages."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug import ConfigError, HandshakeError, TimeoutError
from kvplug_testing.engine import MODEL, FakeEngine, request_of
from lookup_engines import PROMPT, assert_loads, config, pair, promised, tokens

pytestmark = pytest.mark.timeout(60)

KERNEL: dict[str, Any] = {"axes": "KBHTD", "block_format": "transposed"}


# -- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stores": []}, "stores: nothing was given"),
        ({"lookup_buffer": "simple"}, "uses no lookup buffer"),
        ({"lookup": {"page_tokens": 24}}, r"options\.lookup\.page_tokens"),  # divides a kernel's own blocks
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FakeEngine(config("producer", **given), listen="unix:", **KERNEL)


# -- peers that are not there, or are others -----------------------------------------------------


def test_waiting_for_a_missing_producer_raises_an_error_with_its_name_and_address() -> None:
    with FakeEngine(config("consumer"), connect="unix:@kvplug-test-no-engine") as decode:
        with pytest.raises(TimeoutError, match="no-engine"):
            decode.worker.wait_until_ready(0.2)
        with pytest.raises(TimeoutError, match=r"worker 0 at .*no-engine"):
            decode.scheduler.wait_until_ready(0.2)


def test_a_different_model_is_refused_with_every_difference() -> None:
    other = attrs.evolve(MODEL, window=4096, rope="base=1e6")
    with pair(theirs={"model": other}) as (_, decode):
        for side in (decode.worker, decode.scheduler):
            with pytest.raises(HandshakeError) as refused:
                side.wait_until_ready(10)
            for word in ("window", "4096", "rope", "base=1e6"):
                assert word in str(refused.value)
        assert decode.matched(request_of("a", PROMPT)) == (0, False)


# -- blocks that are not pages -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_tokens", "size_here", "size_there", "expected"),
    [
        (48, 16, 32, 96),
        (7, 16, 16, 96),
        (17, 16, 16, 80),
        (128, 16, 16, 0),
    ],
)
def test_pages_of_any_size_are_loaded_into_whole_blocks_of_any_size(
    page_tokens: int, size_here: int, size_there: int, expected: int
) -> None:
    given = {"lookup": {"page_tokens": page_tokens}}
    with pair(
        producer=given, consumer=given, ours={"block_size": size_here}, theirs={"block_size": size_there}
    ) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT), chunk=37)
        assert_loads(decode, request_of("a", PROMPT), expected)


def test_blocks_in_a_kernels_own_order_are_not_divided_for_a_peer() -> None:
    with pair(theirs={"block_size": 32}, **KERNEL) as (prefill, decode):
        with pytest.raises(HandshakeError, match=r"block_size: ours 32, theirs 16; .* moved whole"):
            decode.worker.wait_until_ready(10)
        prefill.prefill(request_of("stored", PROMPT))
        assert decode.matched(request_of("a", PROMPT)) == (0, False), "it computes every prompt itself"


def test_tokens_that_begin_inside_an_indivisible_block_are_not_promised() -> None:
    """An engine may have found a few tokens of a block in its own cache; the rest of it cannot be loaded."""
    with pair(**KERNEL) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        assert decode.matched(request_of("a", PROMPT), num_computed=16) == (80, False)
        assert decode.matched(request_of("b", PROMPT), num_computed=17) == (0, False)
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        prompt = request_of("a", PROMPT)
        assert decode.matched(prompt, num_computed=17) == (79, False)
        blocks = decode.allocate(100)
        decode.compute(prompt.token_ids, blocks, 0, 17)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), 79)
        assert not decode.step([(prompt, blocks, 96, 4)]).invalid_block_ids
        assert decode.is_right(prompt.token_ids, blocks, 100)


# -- caches --------------------------------------------------------------------------------------


def test_a_cache_that_was_allocated_in_inference_mode_is_loaded_into() -> None:
    import torch

    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        with torch.inference_mode():
            decode.kv_caches.update({name: kv.clone() for name, kv in decode.kv_caches.items()})
            decode.worker.register_kv_caches(decode.kv_caches)
            assert_loads(decode, request_of("a", PROMPT), 96)


# -- requests that end ---------------------------------------------------------------------------


def test_an_id_that_is_used_again_at_once_is_a_new_request() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        prefill.prefill(request_of("other", tokens(100, first=1000)))
        first = promised(decode, request_of("a", PROMPT), 96)
        decode.finish(first[0], first[1])
        second = promised(decode, request_of("a", tokens(100, first=1000)), 96)
        assert not decode.step([second]).invalid_block_ids
        assert decode.is_right(second[0].token_ids, second[1], 100)
