"""Engines that divide heads and blocks differently, and what a decode engine pulls of a prompt."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from unittest import mock

import attrs
import pytest
import torch

from kvplug.assembly.links import ControlLink
from kvplug.engine import NO_BLOCK, CacheGroup, KVCacheConfig, RequestEnd, WorkerOutput
from kvplug_testing import waits
from kvplug_testing.contract.connector.suite import KV_OF_A_TOKEN
from kvplug_testing.engine import MODEL, FakeEngine, layout_of, request_of
from p2p_engines import PROMPT, Sharded, an_address, config, failures, loaded, pair, stored, until_named

pytestmark = pytest.mark.timeout(60)

SIZES = [1, 2, 4]
numbers = itertools.count()


@pytest.mark.parametrize(
    ("axes", "num_heads", "theirs", "ours"),
    [
        *(("KBTHD", 4, theirs, ours) for theirs in SIZES for ours in SIZES),
        *(("BHTKD", 2, *sizes) for sizes in [(1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]),
        *(("BTD", 0, *sizes) for sizes in [(1, 4), (4, 1), (2, 4)]),
    ],
)
def test_every_worker_gets_its_heads_of_a_producer_of_another_size(
    axes: str, num_heads: int, theirs: int, ours: int
) -> None:
    """With as many heads as workers or more, with fewer, and with latent attention."""
    with pair(
        make=Sharded, axes=axes, num_heads=num_heads, producer={"size": theirs}, consumer={"size": ours}
    ) as (prefill, decode):
        params = stored(prefill)
        assert loaded(decode, request_of("a", PROMPT, params=params)) == 96
        decode.step([])
        until_named(prefill, "stored")


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (4, 2)])
def test_every_worker_gets_a_latent_cache_whole_also_in_a_kernels_own_order(theirs: int, ours: int) -> None:
    with pair(
        make=Sharded,
        axes="BTD",
        num_heads=0,
        block_format="engine/kernel",
        producer={"size": theirs},
        consumer={"size": ours},
    ) as (prefill, decode):
        assert loaded(decode, request_of("a", PROMPT, params=stored(prefill))) == 96


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 1)])
def test_a_long_prompt_comes_in_several_messages(
    theirs: int, ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplug_p2p.pull.MAX_MESSAGE_BYTES", 1)
    with pair(make=Sharded, num_heads=2, producer={"size": theirs}, consumer={"size": ours}) as (
        prefill,
        decode,
    ):
        assert loaded(decode, request_of("a", PROMPT, params=stored(prefill))) == 96
        decode.step([])
        until_named(prefill, "stored")


def test_a_producer_may_come_back_with_fewer_workers() -> None:
    given = {"num_heads": 4, "make": Sharded}
    with pair(producer={"size": 4}, consumer={"size": 1}, **given) as (prefill, decode):
        assert loaded(decode, request_of("a", PROMPT, params=stored(prefill))) == 96
        host = prefill.address
        prefill.__exit__()
        with Sharded(config("producer", host=host), size=2, num_heads=4, seed=3) as fewer:
            params = stored(fewer)
            waits.until(
                lambda: loaded(decode, request_of(f"b{next(numbers)}", PROMPT, params=params)) == 96,
                what="a load from the producer that has come back",
            )


def test_a_connection_that_is_being_made_does_not_look_like_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of an idle connection reads what comes: it must not take the offer of the pipe."""
    open_pipe = ControlLink.open_pipe

    def open_late(link: ControlLink, *args: Any, **given: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.3)
        return open_pipe(link, *args, **given)

    monkeypatch.setattr("kvplug_p2p.pull._CHECK_S", 0.05)
    monkeypatch.setattr(ControlLink, "open_pipe", open_late)
    with pair() as (prefill, decode):
        assert loaded(decode, request_of("a", PROMPT, params=stored(prefill))) == 96


# -- what is pulled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "computed"), [(16, 16, 48), (32, 16, 16), (8, 32, 64), (16, 16, 96)]
)
@pytest.mark.parametrize("background", [False, True])
def test_only_what_the_consumer_lacks_is_pulled(
    theirs: int, ours: int, computed: int, background: bool
) -> None:
    with pair({"async_load": background}, producer={"block_size": theirs}, consumer={"block_size": ours}) as (
        prefill,
        decode,
    ):
        prompt = request_of("a", PROMPT, params=stored(prefill))
        found, is_async = decode.matched(prompt, computed)
        assert (found, is_async) == (96 - computed, background and computed < 96)
        blocks = decode.allocate(100)
        decode.compute(prompt.token_ids, blocks, 0, computed)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
        reports = [decode.step([])]
        while is_async and "a" not in reports[-1].finished_recving:
            reports.append(decode.step([]))
        assert decode.is_right(prompt.token_ids, blocks, 96)
        figures = (decode.figures() or {}).get("ops", {}).get("load", {"bytes": 0})
        assert figures["bytes"] == found * KV_OF_A_TOKEN
        decode.step([])
        until_named(prefill, "stored")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("theirs", "ours"), [("KBTHD", "BHTKD"), ("BTHKD", "KBTHD")])
def test_every_kind_of_number_is_pulled_bit_for_bit(dtype: str, theirs: str, ours: str) -> None:
    model, kind = attrs.evolve(MODEL, dtype=dtype), getattr(torch, dtype)
    with pair(model=model, is_met=False, producer={"axes": theirs}, consumer={"axes": ours}) as engines:
        for engine in engines:
            tensors = {name: each.mul(50).to(kind) for name, each in engine.cache.tensors.items()}
            engine.worker.register_kv_caches(tensors)
            bits = torch.uint8 if kind.itemsize == 1 else torch.int16
            engine.cache.tensors = {name: each.view(bits) for name, each in tensors.items()}
        prefill, decode = engines
        lent = prefill.allocate(100)
        blocks, _ = pulled(decode, (lent,), lend(prefill, (lent,)))
        for layer in range(len(decode.layer_names)):
            sent, got = (each.cache.by_token(layer) for each in engines)
            assert (got[list(blocks[0][:6])] == sent[list(lent[:6])]).all()
            assert (got[blocks[0][6]] != sent[lent[6]]).any(), "it was equal before"


def lend(prefill: FakeEngine, tables: Any) -> dict[str, Any]:
    """Hand off these blocks, as they are, for the prompt of this test."""
    _, params = prefill.scheduler.request_finished(request_of("stored", PROMPT), tables, RequestEnd.FINISHED)
    prefill.step([])
    return params


def pulled(
    decode: FakeEngine, tables: Any, params: dict[str, Any], count: int = 96
) -> tuple[Any, WorkerOutput]:
    """Load the first tokens of the prompt. Blocks that ``tables`` have not are absent here, too."""
    prompt = request_of("a", PROMPT, params=params)
    assert decode.matched(prompt) == (count, False)
    ours = tuple(
        tuple(block if block == NO_BLOCK else decode.allocate(1)[0] for block in table) for table in tables
    )
    decode.scheduler.update_state_after_alloc(prompt, ours, count)
    report = decode.step([])
    decode.step([])
    return ours, report


GROUPS = (((0, 2), 36), ((1, 3), None))
"""Layers, and how many tokens they attend to: after 100 tokens those from 65 on, so that a producer has freed
four blocks. After 96 tokens they attend to the fourth."""
ABSENT = (NO_BLOCK,)


def grouped() -> KVCacheConfig:
    names = [f"layers.{number}" for number in range(4)]
    groups = [
        CacheGroup(
            layer_names=tuple(names[at] for at in layers), layout=layout_of("KBTHD", 16, 64), window=window
        )
        for layers, window in GROUPS
    ]
    return KVCacheConfig(groups=tuple(groups), num_blocks=64, forward_order=tuple(names))


def test_layers_with_a_window_need_its_blocks_only() -> None:
    with pair(cache=grouped(), num_layers=4) as (prefill, decode):
        tables = (4 * ABSENT + prefill.allocate(48), prefill.allocate(112))
        for table, (layers, _) in zip(tables, GROUPS, strict=True):
            start = 16 * table.count(NO_BLOCK)
            for layer in layers:
                values = prefill.cache.expected(PROMPT, start, 100, layer)
                prefill.cache.write(layer, prefill.cache.at(table, start, 100), values)
        params = lend(prefill, tables)
        ours, report = pulled(decode, tables, params, 99)
        assert not report.invalid_block_ids
        for table, (layers, _) in zip(ours, GROUPS, strict=True):
            wrong = [
                decode.cache.wrong_in(at, PROMPT, table, 16 * table.count(NO_BLOCK), 99) for at in layers
            ]
            assert not any(wrong)
        load = decode.figures()["ops"]["load"]
        assert load["bytes"] == (112 + 48) * KV_OF_A_TOKEN // 3 * 2
        until_named(prefill, "stored")


def test_a_window_whose_blocks_were_freed_is_a_miss() -> None:
    with pair(cache=grouped(), num_layers=4) as (prefill, decode):
        params = lend(prefill, (5 * ABSENT + prefill.allocate(32), prefill.allocate(112)))
        assert decode.matched(request_of("a", PROMPT, params=params)) == (0, False)


def test_a_block_that_only_the_consumer_has_is_reported() -> None:
    """Its engine would take what is in it for the KV of these tokens."""
    with pair(cache=grouped(), num_layers=4) as (prefill, decode):
        full = prefill.allocate(112)
        params = lend(prefill, (4 * ABSENT + prefill.allocate(48), full))
        ours, report = pulled(decode, (full, full), params, 99)
        assert {*ours[0], *ours[1]} == report.invalid_block_ids
        assert failures(decode.worker, "load") or decode.figures()["failures"]["load"]
        until_named(prefill, "stored")


def test_after_a_worker_has_refused_the_producers_blocks_nothing_more_is_promised() -> None:
    """The scheduler sides know no kernel, and agree. By some policies every request would fail."""

    def cache_of(kernel: str) -> dict[str, Any]:
        layout = attrs.evolve(layout_of("KBTHD", 16, 64), block_format=kernel)
        group = CacheGroup(layer_names=tuple(f"layers.{number}" for number in range(3)), layout=layout)
        return {"cache": KVCacheConfig(groups=(group,), num_blocks=64)}

    with pair(is_met=False, producer=cache_of("one"), consumer=cache_of("other")) as (prefill, decode):
        assert loaded(decode, request_of("a", PROMPT, params=stored(prefill))) == 0
        assert decode.figures()["failures"]["load"] == {"refused": 1}
        assert decode.matched(request_of("b", PROMPT, params=stored(prefill, "again"))) == (0, False)
        assert failures(decode.scheduler, "match") == {"refused": 1}


def test_a_producer_that_refuses_this_engine_is_counted_as_such() -> None:
    host = an_address()
    ours = attrs.evolve(MODEL, weights="others")
    consumer = config("consumer", host=an_address("decode"), peers=[f"{host}-0"])
    with FakeEngine(config("producer", host=host)) as prefill, FakeEngine(consumer, model=ours) as decode:
        assert decode.matched(request_of("a", PROMPT, params=stored(prefill))) == (0, False)
        assert failures(decode.scheduler, "match") == {"refused": 1}


def test_a_pull_for_which_there_is_no_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(is_met=False) as (prefill, decode):
        params = stored(prefill)
        monkeypatch.setattr(
            "kvplug_p2p.worker.ProducerWorker", mock.Mock(side_effect=RuntimeError("can't start new thread"))
        )
        assert loaded(decode, request_of("a", PROMPT, params=params)) == 0
        assert decode.figures()["failures"]["load"]
        until_named(prefill, "stored")
