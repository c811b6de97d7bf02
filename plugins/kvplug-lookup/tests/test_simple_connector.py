"""The connector "simple", where the kit does not look: what it holds, whom it asks, and what it refuses."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import attrs
import pytest

from kvplug import Config, ConfigError, HandshakeError, TimeoutError
from kvplug.engine import CacheGroup, KVCacheConfig, Parallelism
from kvplug_lookup.buffer.store import SimpleStore
from kvplug_lookup.simple.worker import Blocks
from kvplug_testing import simulated, waits
from kvplug_testing.engine import MODEL, FakeEngine, request_of

pytestmark = pytest.mark.timeout(60)

PROMPT = range(100)
TWO_PROMPTS = 80_000
"""Bytes for two prompts of six blocks, and not for three."""
_numbers = itertools.count()

Make = Callable[..., FakeEngine]


@pytest.fixture
def host() -> str:
    return f"unix:@kvplug-test-{os.getpid()}-{next(_numbers)}-simple"


@pytest.fixture
def engine(host: str) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(
            role: str, simple: dict[str, Any] | None = None, build: dict[str, Any] | None = None, **more: Any
        ) -> FakeEngine:
            """``simple``: options; ``build``: arguments of the engine; ``more``: other keys of the config."""
            keys = {
                "connector": "simple",
                "host": host,
                "buffer_size": 1 << 20,
                "options": {"simple": simple or {}},
            }
            config = Config.from_dict(
                {**keys, "timeout_s": 10, "connect_timeout_s": 10, "role": role, **more}
            )
            return stack.enter_context(FakeEngine(config, **(build or {})))

        yield make


def promised(decode: FakeEngine, tokens: Any = PROMPT) -> int:
    return decode.matched(request_of(f"ask{next(_numbers)}", tokens))[0]


def loaded(decode: FakeEngine, tokens: Any = PROMPT) -> int:
    """How many tokens were loaded, which are right."""
    request = request_of(f"load{next(_numbers)}", tokens)
    blocks, num_loaded, report = decode.load(request)
    assert not report.invalid_block_ids
    assert decode.is_right(request.token_ids, blocks, num_loaded)
    return num_loaded


def prompts(count: int) -> list[range]:
    return [range(first, first + 100) for first in range(0, 1000 * count, 1000)]


@pytest.mark.parametrize("evict", ["never", "oldest"])
def test_the_oldest_prompts_are_dropped_when_there_is_no_room(engine: Make, evict: str) -> None:
    """Whether the buffer drops them by itself or not."""
    prefill, decode = engine("producer", {"evict": evict}, buffer_size=TWO_PROMPTS), engine("consumer")
    for number, tokens in enumerate(prompts(4)):
        prefill.free_blocks += prefill.prefill(request_of(f"p{number}", tokens))
    assert [promised(decode, tokens) for tokens in prompts(4)] == [0, 0, 96, 96]
    assert loaded(decode, prompts(4)[3]) == 96


def test_a_prompt_that_is_being_read_when_room_is_needed_is_dropped_later(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its stead goes a longer one, which matches its tokens."""
    prefill, decode = engine("producer", buffer_size=100_000), engine("consumer")
    prefill.prefill(request_of("read", PROMPT))
    prefill.prefill(request_of("longer", [*range(96), *range(500, 532)]))
    others, layer = [range(first, first + 100) for first in (1000, 2000, 3000)], Blocks.layer

    def prefill_and_take(blocks: Blocks, index: int, *parts: Any) -> None:
        if index == 0:
            prefill.prefill(request_of("while it is read", others[0]))
        layer(blocks, index, *parts)

    monkeypatch.setattr(Blocks, "layer", prefill_and_take)
    assert loaded(decode) == 96
    for tokens in others[1:]:
        prefill.prefill(request_of(f"later {tokens[0]}", tokens))
    assert [promised(decode, tokens) for tokens in (PROMPT, *others)] == [0, 0, 96, 96]


@pytest.mark.parametrize(
    "lie",
    [
        {"metadata": {}},
        {"metadata": {"digests": 3}},
        {"metadata": {"digests": dict.fromkeys("abc", b"")}},
        {"key": None},
        {"value": None},
    ],
)
@pytest.mark.parametrize("integrity", ["off", "auto"])
def test_the_prompt_of_an_entry_without_kv_of_these_layers_is_computed(
    engine: Make, monkeypatch: pytest.MonkeyPatch, lie: dict[str, Any], integrity: str
) -> None:
    insert = SimpleStore.insert

    def insert_lie(store: Any, tokens: Any, roi: Any, key: Any, value: Any, hidden: Any, **given: Any) -> int:
        parts = {"key": key, "value": value, **{k: v for k, v in lie.items() if k in ("key", "value")}}
        given |= {k: v for k, v in lie.items() if k == "metadata"}
        return insert(store, tokens, roi, parts["key"], parts["value"], hidden, **given)

    monkeypatch.setattr(SimpleStore, "insert", insert_lie)
    prefill, decode = engine("producer", integrity=integrity), engine("consumer")
    prefill.prefill(request_of("stored", PROMPT))
    blocks, num_loaded, report = decode.load(request_of("a", PROMPT))
    assert (num_loaded, report.invalid_block_ids) == (96, frozenset(blocks[:6]))


def test_a_held_prompt_is_not_inserted_again_and_one_that_is_too_large_is_counted(
    engine: Make,
) -> None:
    prefill = engine("producer", buffer_size=TWO_PROMPTS)
    for number, tokens in enumerate([PROMPT, range(64), range(100), range(5000, 5900)]):
        prefill.free_blocks += prefill.prefill(request_of(f"p{number}", tokens))
    figures = prefill.figures()
    assert figures is not None
    assert (figures["ops"]["save"]["count"], figures["failures"]["save"]) == (1, {"too_large": 1})


def test_as_many_tokens_are_promised_as_every_worker_holds(engine: Make) -> None:
    def worker(role: str, rank: int) -> FakeEngine:
        return engine(
            role,
            build={
                "parallelism": Parallelism(worker_rank=rank, num_workers=2, tensor_rank=rank, tensor_size=2)
            },
        )

    ranks, decode = [worker("producer", rank) for rank in range(2)], worker("consumer", 0)
    ranks[0].prefill(request_of("a", PROMPT))
    assert promised(decode) == 0
    ranks[1].prefill(request_of("a", [*range(48), *range(500, 530)]))
    assert promised(decode) == 48
    assert loaded(decode) == 48


def test_a_scheduler_waits_for_no_answer_and_computes_what_is_not_answered_in_time(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = engine("producer"), engine("consumer", {"match_timeout_s": 0.5})
    prefill.prefill(request_of("stored", PROMPT))
    decode.scheduler.wait_until_ready(10)
    goes_on, match = threading.Event(), SimpleStore.match
    monkeypatch.setattr(SimpleStore, "match", lambda *args, **more: goes_on.wait(30) and match(*args, **more))
    prompt = request_of("a", PROMPT)
    decode.scheduler.on_new_request(prompt)
    assert decode.scheduler.get_num_new_matched_tokens(prompt, 0) == (None, False)
    assert decode.ask(prompt) == (0, False)
    goes_on.set()
    waits.until(lambda: promised(decode) == 96, what="an answer of the peer, which goes on")


@pytest.mark.parametrize("integrity", ["off", "auto", "xxh3_128"])
def test_entries_are_verified_with_the_hash_that_was_agreed_on(engine: Make, integrity: str) -> None:
    prefill, decode = engine("producer", integrity=integrity), engine("consumer")
    prefill.prefill(request_of("stored", PROMPT))
    assert loaded(decode) == 96


def test_tokens_that_a_worker_may_not_load_are_promised_only_once(engine: Make) -> None:
    """Only workers know an attention kernel's own order of a block's elements."""
    prefill = engine("producer", build={"axes": "KBHTD", "block_format": "transposed"})
    decode = engine("consumer", build={"axes": "KBHTD"})
    prefill.prefill(request_of("stored", PROMPT))
    blocks, num_loaded, report = decode.load(request_of("a", PROMPT))
    assert (num_loaded, report.invalid_block_ids) == (96, frozenset(blocks[:6]))
    assert promised(decode) == 0


def test_waiting_for_the_peer_raises_the_reason_of_its_failure(engine: Make, host: str) -> None:
    decode = engine("consumer")
    for side in (decode.scheduler, decode.worker):
        with pytest.raises(TimeoutError, match=host.partition("@")[2]):
            side.wait_until_ready(0.2)
    engine("producer", build={"model": attrs.evolve(MODEL, rope="base=1e6")})
    for side in (decode.scheduler, decode.worker):
        waits.until(lambda side=side: _refused(side), what="a refusal")
    assert promised(decode) == 0


def _refused(side: Any) -> bool:
    try:
        side.wait_until_ready(0.1)
    except TimeoutError:
        return False
    except HandshakeError as e:
        return "base=1e6" in str(e)
    return False


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_alone", [True, False])
def test_kv_in_caches_on_a_device_arrives_over_a_pipe_of_the_device(
    engine: Make, seed: int, is_alone: bool
) -> None:
    """The simulated device runs what is queued on it late."""
    given: dict[str, Any] = {"device": "simulated", "transport": "memory", "build": {"device": "simulated"}}
    with simulated.seeded(seed):
        prefill = engine("both" if is_alone else "producer", **given)
        decode = prefill if is_alone else engine("consumer", **given)
        for number, tokens in enumerate(prompts(3)):
            prefill.free_blocks += prefill.prefill(request_of(f"p{number}", tokens))
            assert loaded(decode, tokens) == 96


@pytest.mark.parametrize(
    ("role", "peers"),
    [("consumer", ["unix:@a", "unix:@b"]), ("both", ["unix:@a"]), ("consumer", ["redis://127.0.0.1:6379/0"])],
)
def test_more_than_one_peer_is_refused(engine: Make, role: str, peers: list[str]) -> None:
    with pytest.raises(ConfigError, match="peers: the connector 'simple' loads from one engine"):
        engine(role, peers=peers)


def test_a_peer_may_be_named(engine: Make, host: str) -> None:
    prefill, decode = engine("producer"), engine("consumer", host=f"{host}-other", peers=[f"{host}-0"])
    prefill.prefill(request_of("stored", PROMPT))
    assert loaded(decode) == 96


def test_a_cache_of_several_groups_or_with_a_window_is_refused(engine: Make) -> None:
    group = CacheGroup(layer_names=("a",), layout=engine("producer").layout)
    for groups in [(group, attrs.evolve(group, layer_names=("b",))), (attrs.evolve(group, window=64),)]:
        cache = KVCacheConfig(groups=groups, num_blocks=8, forward_order=("a", "b")[: len(groups)])
        with pytest.raises(ConfigError, match="supports one KV cache group, without a window"):
            engine("consumer", build={"cache": cache})
