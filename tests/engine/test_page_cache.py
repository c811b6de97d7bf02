"""A store as the page cache of an engine with keys and memory of its own."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvplug import Config, ConfigError, build_page_cache
from kvplug.engine import FlatPage
from kvplug.engine.page_cache import PageCache
from kvplug.transport import BlockingStore, MissReason, PageSeal, Presence, PutReason
from kvplug.transport.store.executor import ExecutedStore
from kvplug_testing.memory.store import PagePlace

pytestmark = pytest.mark.timeout(30)


def pages_of_kit() -> PagePlace:
    return PagePlace(1 << 20)


def cache(
    pages: BlockingStore,
    engine: str = "engine",
    namespace: bytes = b"",
    seal: PageSeal | None = None,
    timeout_s: float = 10,
) -> PageCache:
    store = ExecutedStore(pages, name="dict", seal=seal or PageSeal(), timeout_s=timeout_s)
    return PageCache(store, engine=engine, namespace=namespace, timeout_s=timeout_s)


def page(key: bytes, content: bytes, layout: bytes = b"") -> FlatPage:
    return FlatPage(key=key, view=memoryview(bytearray(content)), layout=layout)


def blank(*like: FlatPage) -> list[FlatPage]:
    return [page(each.key, bytes(each.view.nbytes), each.layout) for each in like]


def test_pages_of_several_lengths_and_layouts_come_back_in_the_order_of_the_keys() -> None:
    wanted = [page(b"%d" % n, bytes([n]) * (n % 3 + 1) * 100, b"f%d" % (n % 2)) for n in range(20)]
    with cache(pages_of_kit()) as pages:
        assert pages.put(wanted).wait(5) == [None] * 20
        there = blank(*wanted)
        there[7:7] = [page(b"absent", bytes(100))]
        assert pages.get(there).wait(5) == [None] * 7 + [MissReason.ABSENT] + [None] * 13
        del there[7]
        assert [bytes(each.view) for each in there] == [bytes(each.view) for each in wanted]
        assert pages.lookup([b"3", b"absent"]).wait(5) == [Presence.HELD, Presence.ABSENT]
        assert pages.remove([b"3"]).wait(5) == [True]
        assert pages.lookup([b"3"]).wait(5) == [Presence.ABSENT]
        assert pages.put([]).wait(5) == []


@pytest.mark.parametrize(
    "other",
    [
        {"engine": "engine2"},
        {"namespace": b"model2"},
        {"engine": "enginem", "namespace": b"odel"},  # the same bytes, divided otherwise
        {"seal": PageSeal(secret=b"secret")},
        {"seal": PageSeal(checksums=False)},
    ],
)
def test_another_engine_namespace_or_protection_neither_finds_nor_destroys_a_page(other: Any) -> None:
    place = pages_of_kit()
    mine = cache(place, "engine", b"model")
    theirs = cache(place, **{"engine": "engine", "namespace": b"model", **other})
    kept = page(b"key", b"mine")
    assert mine.put([kept]).wait(5) == [None]
    assert theirs.lookup([b"key"]).wait(5) == [Presence.ABSENT]
    assert theirs.get(blank(kept)).wait(5) == [MissReason.ABSENT]
    assert theirs.put([page(b"key", b"ours")]).wait(5) == [None]
    (again,) = blank(kept)
    assert mine.get([again]).wait(5) == [None]
    assert bytes(again.view) == b"mine"


@pytest.mark.parametrize("other", [page(b"key", bytes(4), b"bfloat16"), page(b"key", bytes(5), b"float16")])
def test_a_page_of_another_layout_or_length_is_a_miss_and_makes_room(other: FlatPage) -> None:
    with cache(pages_of_kit()) as pages:
        assert pages.put([page(b"key", b"1234", b"float16")]).wait(5) == [None]
        assert pages.get([other]).wait(5) == [MissReason.FORMAT]
        assert pages.put([other]).wait(5) == [None]
        assert pages.get([other]).wait(5) == [None]


def test_a_lease_in_the_store_ends_with_the_last_release(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bytes] = []
    with cache(pages_of_kit()) as pages:
        monkeypatch.setattr(pages.store, "release", released.extend)
        assert pages.put([page(b"key", b"1")]).wait(5) == [None]
        for _ in range(2):
            assert pages.lookup([b"key", b"absent"], lease_s=60).wait(5) == [Presence.HELD, Presence.ABSENT]
        assert pages.lookup([b"key"]).wait(5) == [Presence.HELD]
        assert (pages.is_leased(b"key"), pages.is_leased(b"absent"), pages.num_leased) == (True, False, 1)
        released.clear()  # of the absent page
        pages.release([b"key"])
        assert released == []
        pages.release([b"key"])
        assert len(released) == 1
        assert not pages.is_leased(b"key")
        pages.release([b"key", b"never"])
        assert len(released) == 1


def test_a_store_that_fails_is_logged_once_and_every_page_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(PagePlace):
        def fail(self, *_: Any) -> Any:
            raise OSError("no route")

        has = read = write = fail

    place = Failing(1 << 20)
    with caplog.at_level(logging.WARNING, "kvplug.engine"), cache(place) as pages:
        for _ in range(3):
            assert pages.get([page(b"key", b"1")]).wait(5) == [MissReason.STORE_GONE]
            assert pages.put([page(b"key", b"1")]).wait(5) == [PutReason.STORE_GONE]
            assert pages.lookup([b"key"]).wait(5) == [Presence.ABSENT]
    assert len([each for each in caplog.records if each.name == "kvplug.engine.page_cache"]) == 2


def test_after_close_everything_is_a_miss_and_nothing_raises() -> None:
    closed: list[int] = []
    store = ExecutedStore(pages_of_kit(), name="dict", seal=PageSeal())
    pages = PageCache(store, engine="engine", on_close=lambda: closed.append(1))
    assert pages.close() and pages.close()
    assert closed == [1]
    assert pages.get([page(b"key", b"1")]).wait(5) == [MissReason.CLOSED]
    assert pages.put([page(b"key", b"1")]).wait(5) == [PutReason.CLOSED]
    assert pages.lookup([b"key"]).wait(5) == [Presence.ABSENT]
    assert pages.remove([b"key"]).wait(5) == [False]
    pages.release([b"key"])
    pages.touch([b"key"])
    assert pages.usage().num_pages == 0


# -- of a config -------------------------------------------------------------------------------


def test_the_store_of_a_config_counts_what_it_does() -> None:
    config = Config.from_dict({"stores": ["memory"]})
    with build_page_cache(config, engine="engine") as pages:
        kept = page(b"key", b"1234")
        assert pages.put([kept]).wait(5) == [None]
        assert pages.get([*blank(kept), page(b"absent", b"1")]).wait(5) == [None, MissReason.ABSENT]
        assert pages.failures == {"get": {"absent": 1}}
        assert pages.stats.snapshot()["ops"]["get"]["count"] == 1


def test_a_config_is_refused_with_every_fault_by_name() -> None:
    config = Config.from_dict({"stores": ["memory", "host"], "role": "both", "peers": ["10.0.0.1:1"]})
    with pytest.raises(ConfigError) as caught:
        build_page_cache(config, engine="engine")
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["role", "peers", "stores"]
    with pytest.raises(ConfigError, match="sinks"):
        build_page_cache(Config.from_dict({"stores": ["memory"], "sinks": ["lgo"]}), engine="engine")
