"""When a store counts as slow: from figures alone, and with a third-party store that becomes slow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvplug import ClosedError
from kvplug.metrics import rate as rates
from kvplug.metrics.rate import SlowRate, StoreOp, StoreWatch
from kvplug.metrics.record import StoreRecorder
from kvplug.metrics.stats import TransferStats
from kvplug.transport import MissReason, Presence, PutReason
from kvplug.transport.store.executor import ExecutedStore
from kvplug.transport.store.header import PageSeal
from kvplug_lab.named_pages import NamedPages
from kvplug_testing.memory.store import PagePlace

MIB = 1 << 20


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "host_load", lambda: 1.0)


class Store:
    """Gives and takes 64 MiB at a time, in pages of 1 MiB unless a call gives another size."""

    def __init__(self, medium: str = "other", *, refuses: bool = False) -> None:
        self.alarms: list[tuple[StoreOp, SlowRate]] = []
        self.watch = StoreWatch(medium, lambda *found: self.alarms.append(found), refuses=refuses)
        self.now = 100.0

    def move(self, op: StoreOp, gb_per_s: float, count: int, *, at_once: int = 1, **given: Any) -> None:
        results: Sequence[Any] = given.get("results", [None] * 64)
        page = given.get("page", MIB)
        for _ in range(count):
            begun = [self.watch.begin(self.now) for _ in range(at_once)]
            self.now += page * 64 * at_once / 1e9 / gb_per_s
            for shared in begun:
                self.watch.end(op, shared, self.now, page, results)
            self.watch.is_refused(op)


@pytest.mark.parametrize("op", ["get", "put"])
def test_a_store_at_a_hundredth_of_its_earlier_rate_is_reported_once_for_each_direction(op: StoreOp) -> None:
    store = Store()
    store.move(op, 1.0, 200)
    assert not store.alarms
    store.move(op, 0.01, 40)
    ((direction, found),) = store.alarms
    assert direction == op and found.gb_per_s == pytest.approx(0.01)
    assert "512 MiB in 53.7 s), less than a twentieth of the 1 GB/s that it carried before" in str(found)
    other: StoreOp = "put" if op == "get" else "get"
    store.move(other, 1.0, 40)
    store.move(other, 0.01, 40)
    assert [direction for direction, _ in store.alarms] == [op, other]


@pytest.mark.parametrize(
    ("medium", "op", "before", "after"),
    [
        ("other", "get", 1.0, 0.06),
        ("other", "put", 40.0, 0.11),  # pages that were held already; then new ones
        ("disk", "get", 5.0, 0.06),  # out of the page cache; then of the disk
        ("disk", "put", 5.0, 0.06),
    ],
)
def test_a_good_store_is_not_reported(medium: str, op: StoreOp, before: float, after: float) -> None:
    store = Store(medium)
    store.move(op, before, 500)
    store.move(op, after, 100)
    assert not store.alarms


# -- a store of a third party ----------------------------------------------------------------------------

PAGES = NamedPages(MIB)


class Throttled(PagePlace):
    num_threads = 2

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.seconds_per_page = {"get": 0.0, "put": 0.0}
        self.calls = 0

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.calls += 1
        return super().has(keys)

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        self.calls += 1
        time.sleep(self.seconds_per_page["get"])
        return super().read(key, into)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        self.calls += 1
        time.sleep(self.seconds_per_page["put"])
        return super().write(key, page)


@pytest.fixture
def slow_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_SLOW_BATCHES", 3)
    monkeypatch.setattr(rates, "_SLOW_S", 0.1)
    monkeypatch.setattr(rates, "_HISTORY", 4)
    monkeypatch.setattr(rates, "_BATCH_BYTES", MIB)
    monkeypatch.setattr(rates, "STORE_FACTOR", 3)


@pytest.fixture
def throttled() -> Iterator[tuple[Throttled, ExecutedStore, list[StoreOp]]]:
    inner, reported = Throttled(), []
    store = ExecutedStore(inner, name="theirs", seal=PageSeal())
    watch = StoreWatch("other", lambda op, finding: reported.append(op), refuses=True)
    store.recorder = StoreRecorder(TransferStats(), watch)
    with store:
        yield inner, store, reported


@pytest.mark.usefixtures("slow_soon")
def test_a_slow_store_that_is_refused_is_a_miss_for_a_while(
    throttled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, store, reported = throttled
    names = ("a", "b")
    inner.seconds_per_page = {"get": 0.01, "put": 0.01}
    assert PAGES.put(store, *names) == [None, None]
    for _ in range(8):
        assert PAGES.got(store, *names) == [None, None]
    inner.seconds_per_page["get"] = 0.3
    for _ in range(20):
        if (found := PAGES.got(store, *names)) != [None, None]:
            break
    assert found == [MissReason.SLOW] * 2 and reported == ["get"]
    calls, keys = inner.calls, PAGES.request(store, *names).keys
    assert store.submit_lookup(keys).wait(5) == [Presence.ABSENT] * 2
    assert inner.calls == calls, "the store was called"
    assert PAGES.put(store, "c", "d") == [None, None], "the other direction is refused too"
    inner.seconds_per_page["get"] = 0.01
    monkeypatch.setattr(rates.time, "monotonic", lambda now=time.monotonic: now() + rates.REFUSED_S)
    assert PAGES.got(store, *names) == [None, None]
    assert store.submit_lookup(keys).wait(5) == [Presence.HELD] * 2 and reported == ["get"]


@pytest.mark.usefixtures("slow_soon")
def test_a_refused_put_gives_back_its_memory_and_its_keys_and_a_closed_store_raises(throttled: Any) -> None:
    inner, store, reported = throttled
    given_up: list[Any] = []
    store.withdraw = given_up.append
    store.free = given_up.append
    for number in range(8):
        assert PAGES.put(store, f"quick {number}", f"quicker {number}") == [None, None]
    inner.seconds_per_page["put"] = 0.3
    for number in range(20):
        request = PAGES.request(store, f"slow {number}", f"slower {number}")
        if (found := store.submit_put(request).wait(5)) != [None, None]:
            break
        calls = inner.calls
    assert found == [PutReason.SLOW] * 2 and reported == ["put"] and inner.calls == calls
    assert given_up == [request.keys, request.memory]
    store.close()
    with pytest.raises(ClosedError):
        store.submit_put(request)


def test_a_lookup_that_fails_is_not_counted_as_a_miss() -> None:
    class Breaks(PagePlace):
        def has(self, keys: Sequence[bytes]) -> list[bool]:
            raise ConnectionError("the server is gone")

    stats = TransferStats()
    for place in (PagePlace(MIB), Breaks(MIB)):
        with ExecutedStore(place, name="theirs", seal=PageSeal()) as store:
            store.recorder = StoreRecorder(stats, None)
            found = store.submit_lookup(PAGES.request(store, "a", "b").keys).wait(5)
            assert found == [Presence.ABSENT] * 2
    assert stats.snapshot()["failures"] == {"lookup": {"absent": 2, "store_gone": 2}}
