"""The connector "lookup": two engine doubles with real control channels and real pipes between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvplug import Config, ConfigError, HandshakeError, TimeoutError
from kvplug_testing.engine import MODEL, FakeEngine, request_of
from kvplug_testing.faults import FaultyPipe, Plan, Rule

pytestmark = pytest.mark.timeout(60)

BASE: dict[str, Any] = {"connector": "lookup", "connect_timeout_s": 20, "timeout_s": 10}


def config(role: str, **more: Any) -> Config:
    return Config.from_dict({**BASE, "role": role, **more})


@contextlib.contextmanager
def pair(
    *, producer: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None, **build: Any
) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    """A producer and a consumer that know each other. ``producer``/``consumer``: config and engine."""
    ours, theirs = dict(producer or {}), dict(consumer or {})
    with (
        FakeEngine(
            config("producer", **ours.pop("config", {})), listen="unix:", seed=1, **build, **ours
        ) as prefill,
        FakeEngine(
            config("consumer", **theirs.pop("config", {})),
            connect=prefill.worker.contact,
            seed=2,
            **build,
            **theirs,
        ) as decode,
    ):
        yield prefill, decode


def flipping(pipe: Any) -> FaultyPipe:
    """Bits of each layer flip after it was hashed."""
    return FaultyPipe(pipe, Plan(seed=1, rules=[Rule(do="flip", bits=100, min_bytes=4096)]))


def tokens(count: int, first: int = 0) -> range:
    return range(first, first + count)


@pytest.mark.parametrize("axes_there", ["KBTHD", "KBHTD", "BHTKD"])
@pytest.mark.parametrize("axes_here", ["KBTHD", "KBHTD"])
@pytest.mark.parametrize(("size_here", "size_there"), [(16, 16), (16, 32), (32, 16)])
def test_a_prompt_prefilled_here_is_loaded_there_in_its_own_layout(
    axes_here: str, axes_there: str, size_here: int, size_there: int
) -> None:
    with pair(
        producer={"axes": axes_here, "block_size": size_here},
        consumer={"axes": axes_there, "block_size": size_there},
    ) as (prefill, decode):
        prompt = request_of("a", tokens(100))
        prefill.prefill(prompt)
        blocks, loaded, report = decode.load(prompt)
        assert loaded == 99 // size_there * size_there
        assert report.invalid_block_ids == frozenset()
        assert decode.is_right(prompt.token_ids, blocks, 100)


def test_blocks_in_a_kernels_own_order_are_saved_and_loaded_whole() -> None:
    kernel = {"axes": "KBHTD", "block_format": "transposed"}
    with pair(producer=kernel, consumer=kernel) as (prefill, decode):
        for name, count, chunk in (("a", 150, 37), ("b", 160, 16), ("c", 47, None), ("d", 15, None)):
            prompt = request_of(name, tokens(count, 1000 * count))
            prefill.prefill(prompt, chunk=chunk)
            blocks, loaded, _ = decode.load(prompt)
            assert loaded == (count - 1) // 16 * 16
            assert decode.is_right(prompt.token_ids, blocks, count)


def test_blocks_in_a_kernels_own_order_are_not_cut_for_a_peer() -> None:
    ours = {"axes": "KBHTD", "block_format": "transposed"}
    with pair(producer=ours, consumer={**ours, "block_size": 32}) as (prefill, decode):
        for side in (decode.worker, decode.scheduler):
            with pytest.raises(HandshakeError, match=r"block_size: ours 32, theirs 16; .* moved whole"):
                side.wait_until_ready(10)
        prefill.prefill(request_of("stored", tokens(100)))
        assert decode.matched(request_of("a", tokens(100))) == (0, False), "it computes every prompt itself"


def test_what_begins_inside_a_block_that_cannot_be_cut_is_not_promised() -> None:
    """An engine may have found a few tokens of a block in its own cache; the rest of it cannot be loaded."""
    kernel = {"axes": "KBHTD", "block_format": "transposed"}
    with pair(producer=kernel, consumer=kernel) as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        assert decode.matched(request_of("a", tokens(100)), num_computed=16) == (80, False)
        assert decode.matched(request_of("b", tokens(100)), num_computed=17) == (0, False)
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        assert decode.matched(request_of("a", tokens(100)), num_computed=17) == (79, False)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (tokens(64), tokens(100), 64),  # shorter than the query
        (tokens(100), tokens(64), 48),  # longer; the last token is always computed
        (tokens(64), tokens(64), 48),  # equal
        (tokens(70), tokens(100), 64),  # not aligned to blocks
        (tokens(15), tokens(100), 0),  # under a block
        (tokens(100), tokens(15), 0),
        ([*tokens(40), 7, 7, 7], [*tokens(40), 8, 8, 8], 32),  # parting in the third block
        ([1, 2, 120001] * 20, [1, 2, 120002] * 20, 0),  # ids that a tolerance would confuse
    ],
)
def test_what_is_promised_is_the_longest_common_prefix_in_whole_blocks(
    stored: Any, asked: Any, expected: int
) -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", stored))
        asking = request_of("asked", asked)
        blocks, loaded, report = decode.load(asking)
        assert loaded == expected
        assert not report.invalid_block_ids
        assert decode.is_right(asking.token_ids, blocks, len(asking.token_ids))


def test_many_requests_in_one_step_each_get_their_own() -> None:
    with pair() as (prefill, decode):
        prompts = [request_of(f"r{n}", tokens(40, first=1000 * n)) for n in range(5)]
        for prompt in prompts:
            prefill.prefill(prompt)
        scheduled = []
        for prompt in prompts:
            found, _ = decode.matched(prompt)
            assert found == 32
            blocks = decode.allocate(40)
            decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
            scheduled.append((prompt, blocks, found, 40 - found))
        report = decode.step(scheduled)
        assert not report.invalid_block_ids
        for prompt, blocks, *_ in scheduled:
            assert decode.is_right(prompt.token_ids, blocks, 40)


def test_an_entry_can_be_loaded_more_than_once() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("a", tokens(64)))
        for name in ("b", "c"):
            prompt = request_of(name, tokens(64))
            blocks, loaded, _ = decode.load(prompt)
            assert loaded == 48 and decode.is_right(prompt.token_ids, blocks, 64)


def test_corrupted_kv_is_refused_and_its_blocks_are_named_in_the_step() -> None:
    with pair(wrap_pipe=flipping) as (prefill, decode):
        prompt = request_of("a", tokens(100))
        prefill.prefill(prompt)
        blocks, loaded, report = decode.load(prompt)
        assert loaded == 96
        assert report.invalid_block_ids == frozenset(blocks[:6])
        assert decode.figures()["failures"]["load"] == {"corrupt": 1}
        # the engine computes them again, and is not told a second time that they could be loaded
        assert decode.matched(prompt) == (0, False)


def test_without_integrity_corrupted_kv_arrives_and_is_wrong() -> None:
    off = {"config": {"integrity": "off"}}
    with pair(producer=off, consumer=off, wrap_pipe=flipping) as (prefill, decode):
        prompt = request_of("a", tokens(100))
        prefill.prefill(prompt)
        blocks, loaded, report = decode.load(prompt)
        assert loaded == 96 and not report.invalid_block_ids
        assert not decode.is_right(prompt.token_ids, blocks, 96)


def test_an_entry_that_went_between_promise_and_load_is_a_load_error() -> None:
    kv_of_100_tokens = 2 * 3 * 100 * 2 * 8 * 4
    with pair(producer={"config": {"buffer_size": int(1.2 * kv_of_100_tokens)}}) as (prefill, decode):
        prompt = request_of("a", tokens(100))
        prefill.prefill(prompt)
        found, _ = decode.matched(prompt)
        assert found == 96
        prefill.prefill(request_of("b", tokens(100, first=5000)))  # there is room for one only
        decode.matched(request_of("b", tokens(100, first=5000)))  # and this end has heard of it
        blocks = decode.allocate(100)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
        report = decode.step([(prompt, blocks, found, 4)])
        assert report.invalid_block_ids == frozenset(blocks[:6])
        assert decode.figures()["failures"]["load"] == {"gone": 1}


def test_without_a_producer_nothing_is_promised_and_waiting_says_who_is_missing() -> None:
    fast = {"options": {"lookup": {"fence_timeout_s": 0.2}}}
    with FakeEngine(config("consumer", **fast), connect="unix:@kvplug-test-nobody-is-here") as decode:
        assert decode.matched(request_of("a", tokens(100))) == (0, False)
        with pytest.raises(TimeoutError, match="nobody-is-here"):
            decode.worker.wait_until_ready(0.5)
        with pytest.raises(TimeoutError, match="worker 0"):
            decode.scheduler.wait_until_ready(0.5)


def test_a_consumer_that_comes_late_learns_what_was_stored_before() -> None:
    with FakeEngine(config("producer"), listen="unix:") as prefill:
        for n in range(3):
            prefill.prefill(request_of(f"p{n}", tokens(40, first=1000 * n)))
        with FakeEngine(config("consumer"), connect=prefill.worker.contact) as decode:
            for n in range(3):
                assert decode.matched(request_of(f"d{n}", tokens(40, first=1000 * n))) == (32, False)


def test_a_different_model_is_refused_with_every_difference() -> None:
    other = attrs.evolve(MODEL, num_layers=4, dtype="bfloat16", rope="base=1e6")
    with (
        FakeEngine(config("producer"), listen="unix:") as prefill,
        FakeEngine(config("consumer"), connect=prefill.worker.contact, model=other) as decode,
    ):
        for side in (decode.worker, decode.scheduler):
            with pytest.raises(HandshakeError) as refused:
                side.wait_until_ready(10)
            text = str(refused.value)
            for word in ("layers", "dtype", "rope", "float32", "bfloat16"):
                assert word in text
        assert decode.matched(request_of("a", tokens(100))) == (0, False)


def test_a_role_must_be_given() -> None:
    with pytest.raises(ConfigError, match="role"):
        FakeEngine(Config.from_dict(BASE))


def test_stats_add_up() -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", tokens(100))
        prefill.prefill(prompt)
        decode.load(prompt)
        saved, loaded = prefill.figures(), decode.figures()
        assert saved is not None and loaded is not None
        assert saved["ops"]["save"]["count"] == 1
        assert saved["ops"]["save"]["bytes"] == 2 * 3 * 100 * 2 * 8 * 4
        assert loaded["ops"]["load"]["count"] == 1
        assert loaded["ops"]["load"]["bytes"] == 2 * 3 * 96 * 2 * 8 * 4
        assert decode.figures() is None
