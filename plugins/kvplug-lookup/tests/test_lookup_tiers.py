"""Stores one after the other: what the first one has no room for, a later one still has."""

from __future__ import annotations

import errno
import logging
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplug.metrics.store_rate import MeasuredStore
from kvplug.transport import MissReason, Presence
from kvplug_fs.store import FolderStore
from kvplug_lookup.connector.warnings import CountedWarnings
from kvplug_testing.engine import MODEL, FakeEngine, request_of
from kvplug_testing.named_pages import own_store
from kvplug_testing.waits import until
from lookup_engines import (
    PROMPT,
    an_address,
    assert_loads,
    both,
    chains_of,
    config,
    failures,
    first_store,
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
LOGS = ("kvplug_lookup.connector.worker", "a test")


def tiers(path: Path, **host: Any) -> dict[str, Any]:
    return {"stores": ["host", "fs"], "options": {"host": {**SMALL, **host}, "fs": {"path": str(path)}}}


def on_disk(path: Path) -> dict[str, Any]:
    return {"stores": ["fs"], "options": {"fs": {"path": str(path)}}}


def num_files(engine: FakeEngine) -> int:
    """Pages in the later store, once nothing is copied there any more."""
    until(lambda: not engine.worker.num_behind, what="the end of what is behind")
    found: int = engine.worker.tiers["fs"].store.usage().num_pages
    return found


def sources(engine: FakeEngine, name: str) -> Any:
    """Where the pages that were promised to a request come from."""
    return engine.scheduler.sources_of(name)


def test_what_the_first_store_evicted_is_loaded_from_the_next_and_promoted(tmp_path: Path) -> None:
    with both(**tiers(tmp_path)) as engine:
        engine.prefill(request_of("old", PROMPT))
        assert (num_held(engine), num_files(engine)) == (6, 6)
        for number in range(1, 40):
            saved(engine, number)
            until(lambda expected=6 + 6 * number: num_files(engine) == expected, what="six files more")  # type: ignore[misc]
        series, store = engine.worker.first_tier.series, first_store(engine)
        chains = chains_of(PROMPT)
        assert set(store.submit_lookup(series.keys_of(chains)).wait()) == {Presence.ABSENT}

        prompt = request_of("a", PROMPT)
        assert engine.matched(prompt) == (96, False)
        assert sources(engine, "a") == ((("fs", 6),),)
        assert_loads(engine, prompt, 96)
        until(lambda: set(store.submit_lookup(series.keys_of(chains)).wait()) == {Presence.HELD})
        assert engine.matched(request_of("b", PROMPT)) == (96, False)
        assert sources(engine, "b") == ((("host", 6),),), "it was not promoted"
        copied: list[int] = []

        def are_all_counted() -> bool:  # a page is counted after it is there
            found = engine.figures() or {"ops": {}}
            copied.append(found["ops"].get("copy", {"count": 0})["count"])
            return sum(copied) >= 240 + 6

        until(are_all_counted)
        assert sum(copied) == 240 + 6
        assert_loads(engine, request_of("c", PROMPT), 96)


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
        assert sources(engine, "c") == ((("host", 6), ("fs", 54)),)
        assert engine.scheduler.get_hit_sources(prompt, 960) == {"host": 96, "disk": 864}
        assert engine.scheduler.get_hit_sources(prompt, 90) == {"host": 90}
        assert_loads(engine, prompt, 960)


# -- models that may differ ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({"weights": "a"}, {"weights": "a", "name": "renamed"}, 96),
        ({"weights": "a"}, {"weights": "b"}, 0),
        ({"weights": "", "name": "a"}, {"weights": "", "name": "b"}, 0),
    ],
)
def test_kv_is_loaded_from_a_folder_only_where_the_weights_are_known_to_be_equal(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], shared: int
) -> None:
    given = config("both", host=an_address("weights"), engine_id="restarts", **on_disk(tmp_path))
    with FakeEngine(given, model=attrs.evolve(MODEL, **first)) as engine:
        engine.prefill(request_of("stored", PROMPT))
        assert_loads(engine, request_of("own", PROMPT), 96)
        until(lambda: not engine.worker.bytes_unsaved, what="the end of all saves")
    with FakeEngine(given, model=attrs.evolve(MODEL, **second)) as engine:
        assert engine.matched(request_of("a", PROMPT))[0] == shared


def test_weights_that_the_operator_states_are_shared_and_those_that_are_unknown_warn_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = attrs.evolve(MODEL, weights="")
    for stated, found in (("w at 1", 0), ("w at 1", 96), ("w at 2", 0), ("", 0)):
        assert not caplog.records
        given = config("both", host=an_address("stated"), weights=stated, **on_disk(tmp_path))
        with FakeEngine(given, model=unknown) as engine:
            assert engine.matched(request_of("a", PROMPT))[0] == found
            engine.prefill(request_of("stored", PROMPT))
            until(lambda engine=engine: not engine.worker.bytes_unsaved)  # type: ignore[misc]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "the weights of fake are unknown" in warning and "set weights to a text" in warning


# -- pages that cannot be read ---------------------------------------------------------------------


def test_a_page_that_a_worker_cannot_read_is_not_promised_again_and_hides_no_page_before_it(
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


def saved(engine: FakeEngine, number: int, **given: Any) -> None:
    """Six pages of a prompt are in the first store."""
    blocks = engine.prefill(request_of(f"p{number}", prompt_of(number), **given))
    engine.free_blocks.extend(blocks)
    num_held(engine)


def loaded(decode: FakeEngine, number: int) -> None:
    until_promised(decode, prompt_of(number), 96)
    assert_loads(decode, request_of(f"d{number}", prompt_of(number)), 96)


@pytest.mark.parametrize("mapped", [True, False])
def test_what_decode_has_still_to_load_outlives_what_it_has_loaded(mapped: bool) -> None:
    given = {"options": {"host": {**SMALL, "map": mapped}}}
    with pair(producer=given, consumer=given) as (prefill, decode):
        for number in range(30):
            saved(prefill, number)
            loaded(decode, number)
        for number in range(40, 60):
            saved(prefill, number)
        assert first_store(prefill).usage().num_waiting == 6 * 20
        for number in range(40, 60):
            loaded(decode, number)
        until(lambda: first_store(prefill).usage().num_waiting == 0, what="that nothing waits")


def test_what_was_promised_outlives_what_was_handed_over() -> None:
    """Without an announcement: decode has loaded it before, and forgotten it."""
    with pair(producer={"options": {"host": SMALL}}) as (prefill, decode):
        for number in range(20):
            saved(prefill, number)
            loaded(decode, number)
        again = promised(decode, request_of("again", tokens(100)), 96)
        pages = first_store(prefill)
        until(lambda: pages.usage().num_waiting == 0, what="that nothing waits")
        for number in range(20, 42):
            saved(prefill, number)
        report = decode.step([again])
        assert report.invalid_block_ids == frozenset()
        assert decode.is_right(again[0].token_ids, again[1], 100)


@pytest.mark.parametrize(
    ("count", "size", "said"),
    [
        (2, 4000, "MiB, and the store 'host' holds"),
        (60, 100, "pages were evicted that another engine was to load"),
    ],
    ids=["a prompt larger than it", "many that wait"],
)
def test_a_store_that_is_too_small_is_warned_of_once(
    count: int, size: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(producer={"options": {"host": SMALL}}, ours={"num_blocks": 300}) as (prefill, _):
        for number in range(count):
            prompt = request_of(f"p{number}", tokens(size, first=10_000 * number))
            blocks = prefill.prefill(prompt, chunk=400)
            prefill.free_blocks.extend(blocks)
            num_held(prefill)
    (told,) = [record.getMessage() for record in caplog.records if said in record.getMessage()]
    assert "1 MiB" in told and "options.host.size" in told


def test_decode_counts_by_source_what_is_not_held_also_where_nothing_is_promised() -> None:
    with pair() as (prefill, decode):
        saved(prefill, 1)
        until_promised(decode, prompt_of(1), 96)
        decode.scheduler.get_stats()
        longer = request_of("longer", [*prompt_of(1), *range(50)])
        for _ in range(2):  # an engine without free blocks asks again
            assert decode.matched(longer) == (96, False)
            assert decode.matched(request_of("unknown", tokens(100))) == (0, False)
        counted = decode.scheduler.get_stats()
        assert counted["not_held"] == {"peer": 6 + 3}
        assert decode.scheduler.get_stats() is None or "not_held" not in decode.scheduler.get_stats()


def test_a_prompt_that_is_saved_again_after_a_preemption_waits_for_its_reader_once() -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", PROMPT)
        blocks = prefill.admit(prompt)
        prefill.step([(prompt, blocks, 0, 100)])
        num_held(prefill)
        prefill.step([], preempted=frozenset({"a"}))
        prefill.step([(prompt, blocks, 0, 100)])
        num_held(prefill)
        prefill.finish(prompt, blocks)
        prefill.settle()
        until_promised(decode, PROMPT, 96)
        assert_loads(decode, request_of("d", PROMPT), 96)
        until(lambda: first_store(prefill).usage().num_waiting == 0, what="that nothing waits")


def test_what_an_engine_loads_itself_goes_before_what_another_one_has_still_to_load() -> None:
    announced = {"params": {"do_remote_decode": True}}
    with both(options={"host": SMALL}) as engine:
        saved(engine, 0)
        assert_loads(engine, request_of("again", tokens(100), **announced), 96)
        saved(engine, 1, **announced)
        for number in range(2, 60):
            saved(engine, number)
            assert_loads(engine, request_of(f"own {number}", prompt_of(number)), 96)
        assert first_store(engine).usage().num_waiting == 6 * 2
        for number in range(2):
            assert_loads(engine, request_of(f"waits {number}", prompt_of(number)), 96)


# -- stores that are slow ------------------------------------------------------------------------


def refuse_gets(monkeypatch: pytest.MonkeyPatch, for_s: float) -> None:
    """Stores are refused for so long, as by the alarm about slow stores."""
    get, until_s = MeasuredStore.submit_get, time.monotonic() + for_s

    def refuse(store: MeasuredStore, pages: Any, **given: Any) -> Any:
        if time.monotonic() < until_s:
            return missed(pages, MissReason.SLOW)
        return get(store, pages, **given)

    monkeypatch.setattr(MeasuredStore, "submit_get", refuse)


@pytest.mark.parametrize("name", ["host", "fs"])
def test_what_is_refused_since_it_is_slow_is_not_promised_until_it_is_tried_again(
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


def test_after_a_reset_an_engine_finds_none_of_its_old_pages_in_a_folder_and_others_do(
    tmp_path: Path,
) -> None:
    with both(**tiers(tmp_path)) as engine, both(**tiers(tmp_path)) as other:
        engine.prefill(request_of("stored", PROMPT))
        until(lambda: num_files(engine) == 6)
        assert engine.scheduler.reset_cache() is True
        engine.step([])
        engine.weights = 1.0
        assert engine.matched(request_of("a", PROMPT)) == (0, False)
        engine.prefill(request_of("again", PROMPT))
        assert_loads(engine, request_of("b", PROMPT), 96)
        assert_loads(other, request_of("c", PROMPT), 96)


def test_what_a_folder_has_no_room_for_any_more_is_counted(tmp_path: Path) -> None:
    """A folder has no events: what this engine has evicted there is in its usage."""
    options = {"fs": {"path": str(tmp_path), "size": 1 << 20}}
    with both(stores=["fs"], options=options) as engine:
        for number in range(10):
            blocks = engine.prefill(request_of(f"p{number}", tokens(1600, first=10_000 * number)))
            engine.free_blocks.extend(blocks)
        until(lambda: not engine.worker.bytes_unsaved, what="the end of all saves")
        usage = first_store(engine).usage()
        evicted = engine.figures()["ops"]["evict"]["count"]
        assert evicted == usage.num_evicted > 0
        assert engine.figures() is None, "counted twice"


@pytest.mark.parametrize("in_background", [True, False])
def test_a_disk_that_does_not_answer_holds_up_no_step_longer_than_the_stall_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    answers = threading.Event()
    lookup = {"async_load": in_background, "stall_timeout_s": 0.5}
    with both(lookup, **on_disk(tmp_path)) as engine:
        engine.prefill(request_of("saved", PROMPT))
        assert num_held(engine) == 6
        disk = own_store(first_store(engine))
        read = disk.read
        monkeypatch.setattr(disk, "read", lambda *args: answers.wait(30) and read(*args))
        try:
            prompt = request_of("a", PROMPT)
            began = time.monotonic()
            blocks, loaded, report = engine.load(prompt)
            took = time.monotonic() - began
            assert loaded == 96
            if in_background:
                assert not report.finished_recving
                assert took < 0.4, f"the step took {took:.2f} s"
                reports: list[Any] = []
                until(lambda: reports.append(engine.step([])) or reports[-1].finished_recving == {"a"})
                report = reports[-1]
            assert report.invalid_block_ids == set(blocks[:6])
            assert failures(engine, "load") == {"stalled": 1}
        finally:
            answers.set()
        engine.finish(prompt, blocks)
        engine.free_blocks.extend(blocks)
        until_promised(engine, PROMPT, 96)  # not at once: it was silent


def test_peers_load_from_an_engines_first_store_whatever_follows_it(tmp_path: Path) -> None:
    with pair(producer=tiers(tmp_path)) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        assert_loads(decode, request_of("a", PROMPT), 96)


# -- what the log says -----------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["fs"], ["host", "fs"]])
def test_a_full_disk_is_one_line_a_minute_with_store_folder_and_count(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvplug_fs.store.FolderStore.write", lambda *_: False)
    with both(stores=names, options={"fs": {"path": str(tmp_path)}}) as engine:
        for number in range(20):
            saved(engine, number)
        num_files(engine) if len(names) > 1 else None
        assert _lines(caplog) == [f"6 pages were not kept by the store 'fs' ({tmp_path}): no_room"]
    assert _lines(caplog)[1:] == [f"114 pages were not kept by the store 'fs' ({tmp_path}): no_room"]


def test_loads_that_fail_are_one_line_a_minute_with_store_folder_and_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with both(**on_disk(tmp_path)) as engine:
        engine.prefill(request_of("stored", PROMPT))
        requests = [request_of(f"a{number}", PROMPT) for number in range(5)]
        scheduled = [promised(engine, request, 96) for request in requests]
        series = engine.worker.first_tier.series
        first_store(engine).submit_remove(series.keys_of(chains_of(PROMPT))).wait(10)
        engine.step(scheduled)
        assert _lines(caplog) == [f"96 tokens from 'fs' ({tmp_path}) could not be loaded: absent"]
    assert _lines(caplog)[1:] == [f"384 tokens from 'fs' ({tmp_path}) could not be loaded: absent"]


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name in LOGS]


def test_a_cause_is_logged_again_after_a_minute_with_what_came_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    warnings = CountedWarnings(logging.getLogger("a test"), lambda: now)
    for count, cause in ((1, "full"), (2, "full"), (3, "gone"), (4, "full")):
        warnings.warn(count, cause)
    assert _lines(caplog) == ["1 full", "3 gone"]
    now = 160.0
    warnings.flush()
    assert _lines(caplog)[2:] == ["6 full"]
    now = 230.0
    warnings.flush()
    warnings.warn(5, "full")
    assert _lines(caplog)[3:] == ["5 full"]
