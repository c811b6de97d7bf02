"""Stores one after the other: what the first one has no room for, a later one still has."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplug.transport import BackgroundThread, FolderStore, MissReason, Presence
from kvplug.transport.store.store import Store
from kvplug_lookup.connector.warnings import CountedWarnings
from kvplug_testing.engine import MODEL, FakeEngine, request_of
from kvplug_testing.waits import until
from lookup_engines import (
    PROMPT,
    an_address,
    assert_loads,
    both,
    chains_of,
    config,
    failures,
    missed,
    num_held,
    pair,
    promised,
    tokens,
    until_promised,
)

pytestmark = pytest.mark.timeout(60)

SMALL = {"size": 1 << 20, "segment_bytes": 1 << 18}
"""Room for some 160 pages."""


def tiers(path: Path, **host: Any) -> dict[str, Any]:
    return {"stores": ["host", "fs"], "options": {"host": {**SMALL, **host}, "fs": {"path": str(path)}}}


def on_disk(path: Path) -> dict[str, Any]:
    return {"stores": ["fs"], "options": {"fs": {"path": str(path)}}}


def num_files(engine: FakeEngine) -> int:
    """Pages in the later store, once nothing is copied there any more."""
    until(lambda: not engine.worker.saver.num_behind, what="the end of what is behind")
    found: int = engine.worker.tiers["fs"].store.usage().num_pages
    return found


def test_pages_that_the_first_store_evicted_are_loaded_from_the_next_one_and_promoted(tmp_path: Path) -> None:
    with both(**tiers(tmp_path)) as engine:
        engine.prefill(request_of("old", PROMPT))
        assert (num_held(engine), num_files(engine)) == (6, 6)
        for number in range(1, 40):
            saved(engine, number)
            until(lambda expected=6 + 6 * number: num_files(engine) == expected, what="six files more")  # type: ignore[misc]
        series, store = engine.worker.first_tier.series, engine.worker.first_tier.store
        chains = chains_of(PROMPT)
        assert set(store.submit_lookup(series.keys_of(chains)).wait()) == {Presence.ABSENT}

        prompt = request_of("a", PROMPT)
        assert engine.matched(prompt) == (96, False)
        assert engine.scheduler.get_hit_sources(prompt, 96) == {"disk": 96}
        assert_loads(engine, prompt, 96)
        until(lambda: set(store.submit_lookup(series.keys_of(chains)).wait()) == {Presence.HELD})
        again = request_of("b", PROMPT)
        assert engine.matched(again) == (96, False)
        assert engine.scheduler.get_hit_sources(again, 96) == {"host": 96}, "it was not promoted"
        assert_loads(engine, request_of("c", PROMPT), 96)


def test_without_a_thread_pages_stay_in_the_first_store_and_later_ones_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = BackgroundThread.start

    def refuse(thread: BackgroundThread) -> None:
        if thread.name == "kvplug-lookup-behind":
            raise RuntimeError("can't start new thread")
        start(thread)

    with both(**tiers(tmp_path)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(BackgroundThread, "start", refuse)
            engine.prefill(request_of("stored", PROMPT))
            until(lambda: failures(engine, "copy") == {"no_room": 1})
        assert (num_held(engine), num_files(engine)) == (6, 0)
        saved(engine, 1)
        until(lambda: num_files(engine) == 6, what="the files of the later pages")


def test_one_load_takes_its_pages_from_several_stores(tmp_path: Path) -> None:
    with both({"promote": False}, **tiers(tmp_path, size=256 << 10, segment_bytes=256 << 10)) as engine:
        engine.prefill(request_of("head", PROMPT))
        for name in "ab":
            assert_loads(engine, request_of(name, PROMPT), 96)  # so that these pages are in use
        long = request_of("long", tokens(960))  # of more pages than the first store holds
        blocks = engine.admit(long)
        for number in range(1, 11):
            engine.step([(long, blocks, 96 * (number - 1), 96)])
            until(lambda expected=6 * number: num_files(engine) == expected, what="six files more")  # type: ignore[misc]
        engine.finish(long, blocks)
        assert 0 < num_held(engine) < 60
        prompt = request_of("c", tokens(970))
        assert engine.matched(prompt) == (960, False)
        assert engine.scheduler.get_hit_sources(prompt, 960) == {"host": 96, "disk": 864}
        assert engine.scheduler.get_hit_sources(prompt, 90) == {"host": 90}
        assert_loads(engine, prompt, 960)


# -- models that may differ ------------------------------------------------------------------------


def test_kv_is_loaded_from_a_folder_only_where_the_weights_are_known_to_be_equal(tmp_path: Path) -> None:
    for name, weights, stated, found in (
        ("a", "x", "", 0),
        ("renamed", "x", "", 96),
        ("a", "y", "", 0),
        ("a", "", "as the operator says", 0),
        ("b", "", "as the operator says", 96),
        ("a", "", "something else", 0),
        ("a", "", "", 0),
        ("b", "", "", 0),
    ):
        given = config("both", host=an_address("weights"), weights=stated, **on_disk(tmp_path))
        with FakeEngine(given, model=attrs.evolve(MODEL, name=name, weights=weights)) as engine:
            assert engine.matched(request_of("a", PROMPT))[0] == found
            engine.prefill(request_of("stored", PROMPT))
            num_held(engine)


# -- pages that cannot be read ---------------------------------------------------------------------


def test_a_page_that_a_worker_cannot_read_is_not_promised_again_but_pages_before_it_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler side has a store object of its own, which knows nothing of the worker's errors."""
    given = on_disk(tmp_path)
    with both(**given) as engine:
        engine.prefill(request_of("stored", PROMPT))
        assert_loads(engine, request_of("own", PROMPT), 96)
        bad = engine.worker.first_tier.series.keys_of(chains_of(PROMPT))[3]
    read = FolderStore.read

    def fail(self: FolderStore, key: bytes, into: Any) -> int | None:
        if key == bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, key, into)

    monkeypatch.setattr(FolderStore, "read", fail)
    with FakeEngine(config("consumer", **given)) as engine:
        request, blocks, *rest = promised(engine, request_of("a", PROMPT), 96)
        assert engine.step([(request, blocks, *rest)]).invalid_block_ids == frozenset(blocks[3:6])
        assert failures(engine, "load") == {"unreadable": 1}
        for number in range(3):
            assert_loads(engine, request_of(f"b{number}", PROMPT), 48)


# -- a first store whose pages others load ---------------------------------------------------------


def prompt_of(number: int) -> range:
    return tokens(100, first=1000 * number)


def saved(engine: FakeEngine, number: int) -> None:
    """Six pages of a prompt are in the first store."""
    blocks = engine.prefill(request_of(f"p{number}", prompt_of(number)))
    engine.free_blocks.extend(blocks)
    num_held(engine)


def loaded(decode: FakeEngine, number: int) -> None:
    until_promised(decode, prompt_of(number), 96)
    assert_loads(decode, request_of(f"d{number}", prompt_of(number)), 96)


@pytest.mark.parametrize("mapped", [True, False])
def test_pages_that_decode_has_not_loaded_yet_outlive_those_that_it_has_loaded(mapped: bool) -> None:
    given = {"options": {"host": {**SMALL, "map": mapped}}}
    with pair(producer=given, consumer=given) as (prefill, decode):
        for number in range(30):
            saved(prefill, number)
            loaded(decode, number)
        for number in range(40, 60):
            saved(prefill, number)
        assert prefill.worker.first_tier.store.usage().num_waiting == 6 * 20
        for number in range(40, 60):
            loaded(decode, number)
        until(lambda: prefill.worker.first_tier.store.usage().num_waiting == 0, what="that nothing waits")


# -- stores that are slow ------------------------------------------------------------------------


def refuse_gets(monkeypatch: pytest.MonkeyPatch, for_s: float) -> None:
    """Stores are refused for so long, as by the alarm about slow stores."""
    get, until_s = Store.submit_get, time.monotonic() + for_s

    def refuse(store: Store, pages: Any, **given: Any) -> Any:
        if time.monotonic() < until_s and store.recorder is not None:
            return store.recorder.record("get", 0, lambda: missed(pages, MissReason.SLOW))
        return get(store, pages, **given)

    monkeypatch.setattr(Store, "submit_get", refuse)


@pytest.mark.parametrize("name", ["host", "fs"])
def test_a_source_that_was_refused_as_slow_is_not_promised_until_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("kvplug_lookup.connector.sources._REST_S", 2.0)
    more = {**tiers(tmp_path), "stores": [name], "slow_path": "refuse"}
    with both(**more) as engine:
        engine.prefill(request_of("stored", PROMPT))
        num_held(engine)
        assert_loads(engine, request_of("a", PROMPT), 96)
        refuse_gets(monkeypatch, 2.0)
        blocks, loaded, report = engine.load(request_of("b", PROMPT))
        assert (loaded, report.invalid_block_ids) == (96, frozenset(blocks[:6]))
        assert failures(engine, "load") == {"slow": 1}
        for asking in "cd":
            assert engine.matched(request_of(asking, PROMPT)) == (0, False)
        until_promised(engine, PROMPT, 96)
        assert_loads(engine, request_of("e", PROMPT), 96)


# -- stores that outlive their engines -----------------------------------------------------------


def test_after_a_reset_other_engines_find_an_engines_old_pages_in_a_folder_but_it_does_not(
    tmp_path: Path,
) -> None:
    with both(**tiers(tmp_path)) as engine, both(**tiers(tmp_path)) as other:
        engine.prefill(request_of("stored", PROMPT))
        until(lambda: num_files(engine) == 6)
        assert engine.scheduler.reset_cache() is True
        engine.step([])
        engine.cache.weights = 1.0
        assert engine.matched(request_of("a", PROMPT)) == (0, False)
        engine.prefill(request_of("again", PROMPT))
        assert_loads(engine, request_of("b", PROMPT), 96)
        assert_loads(other, request_of("c", PROMPT), 96)


def test_peers_load_from_an_engines_first_store_whatever_its_later_stores_are(tmp_path: Path) -> None:
    with pair(producer=tiers(tmp_path)) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        assert_loads(decode, request_of("a", PROMPT), 96)


# -- the log ---------------------------------------------------------------------------------------


def test_a_cause_is_logged_again_after_a_minute_with_the_count_since_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records]

    now = 100.0
    warnings = CountedWarnings(logging.getLogger("a test"), lambda: now)
    for count, cause in ((1, "full"), (2, "full"), (3, "gone"), (4, "full")):
        warnings.warn(count, cause)
    assert lines() == ["1 full", "3 gone"]
    now = 160.0
    warnings.flush()
    assert lines()[2:] == ["6 full"]
