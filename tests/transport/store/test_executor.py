"""The executor that makes a store of blocking calls: turns, back-off, and what a failed call means.

What every store must do is judged by the conformance kit with the store "memory", which this executor runs.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest

from kvplug.errors import TimeoutError, UnsupportedError
from kvplug.transport.store import executor, page_calls
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.copy import PageCopy
from kvplug.transport.store.executor import ExecutedStore
from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.keys import Series, foreign_key
from kvplug.transport.store.memory import PageBuffers
from kvplug.transport.store.results import MissReason, Presence, PutReason
from kvplug.transport.store.store import PageRequest
from kvplug_testing.contract.store.pages import HeldMemory
from kvplug_testing.memory.store import PagePlace
from kvplug_testing.waits import until

SEAL = PageSeal()
SERIES = Series(opaque_format(64), b"", SEAL.id)


class InDict(PagePlace):
    """The kit's pages in memory, whose calls go through :attr:`gate` first."""

    num_threads = 2

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.calls: list[tuple[str, bytes]] = []
        self.gate: Callable[[str, bytes], None] = lambda call, key: None
        self.opened = threading.Event()
        """What :meth:`held_up` waits for."""

    def _enter(self, call: str, key: bytes) -> None:
        self.calls.append((call, key))
        self.gate(call, key)

    @contextlib.contextmanager
    def held_up(self, keys: Sequence[bytes] = (), call: str = "") -> Iterator[None]:
        """Calls (of that name) for these keys return when the block ends or :attr:`opened` is set."""

        def wait(name: str, key: bytes) -> None:
            if call in ("", name) and (not keys or key in keys):
                self.opened.wait(20)

        self.opened.clear()
        self.gate = wait
        try:
            yield
        finally:
            self.opened.set()
            self.gate = lambda call, key: None

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter("has", keys[0])
        return super().has(keys)

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        self._enter("read", key)
        return super().read(key, into)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        self._enter("write", key)
        return super().write(key, page)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._enter("remove", keys[0])
        super().remove(keys)


@pytest.fixture(params=[0, 1 << 20], ids=["page by page", "in batches"])
def inner(request: pytest.FixtureRequest) -> InDict:
    made = InDict()
    made.batch_bytes = request.param
    return made


@pytest.fixture
def store(inner: InDict) -> Iterator[ExecutedStore]:
    with ExecutedStore(inner, name="dict", seal=SEAL, timeout_s=10.0) as made:
        yield made
        inner.gate = lambda call, key: None


def request(*names: str, fill: str = "") -> PageRequest:
    memory = PageBuffers.empty(SERIES.format, len(names))
    if fill:
        for index in range(len(names)):
            memory.rows().row(index)[:] = fill.encode() * (64 // len(fill))
    identities = [name.encode() for name in names]
    keys = [foreign_key(b"test", identity) for identity in identities]
    return PageRequest(series=SERIES, keys=keys, identities=identities, memory=memory)


def failing(error: Exception, *names: str, calls: Sequence[str] = ()) -> Callable[[str, bytes], None]:
    """A gate at which these calls (all) of these pages (all) fail."""
    keys = request(*names).keys

    def gate(call: str, key: bytes) -> None:
        if (not calls or call in calls) and (not names or key in keys):
            raise error

    return gate


LOST = OSError(errno.EIO, "input/output error")


def content(pages: PageRequest) -> list[bytes]:
    return [bytes(pages.memory.rows().row(index)[:1]) for index in range(len(pages.keys))]


def test_calls_that_never_return_do_not_hold_up_other_jobs_for_ever(inner: InDict) -> None:
    stuck = request("a", "b")
    with ExecutedStore(inner, name="dict", seal=SEAL, timeout_s=0.2) as store, inner.held_up(stuck.keys):
        assert store.submit_get(stuck).wait(5) == [MissReason.TIMEOUT] * 2
        until(lambda: len(inner.calls) == 2)
        time.sleep(0.25)  # longer than the default deadline: the threads count as stuck
        assert store.submit_lookup(request("c").keys).wait(5) == [Presence.ABSENT]
        assert ("has", request("c").keys[0]) in inner.calls


def test_a_job_that_was_given_up_settles_with_the_last_of_its_copies(store: ExecutedStore) -> None:
    assert store.submit_put(request("a", "b", fill="x")).wait(5) == [None, None]
    wanted = request("a", "b")
    pages = [HeldMemory(wanted.memory, at) for at in range(2)]

    class EachOfItsOwn(HeldMemory):
        def hold(self, page: range) -> Any:
            return pages[page.start].hold(page)

    with pages[0], pages[1]:
        job = store.submit_get(attrs.evolve(wanted, memory=EachOfItsOwn(wanted.memory)))
        for page in pages:
            page.wait_begun()
        job.cancel()
        pages[0].go_on.set()
        assert not job.wait_settled(0.2), "a copy is under way"
    assert job.wait_settled(5)


def test_threads_that_begin_a_job_at_the_same_time_copy_to_their_own_memory(
    store: ExecutedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one copies to the address 0."""
    at_once = threading.Barrier(2)

    class Copy(PageCopy):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.used: set[int] = set()
            at_once.wait(5)

        def use(self, first: int, *given: Any) -> None:
            super().use(first, *given)
            self.used.add(first)
            at_once.wait(5)

        def save(self, pages: range) -> Any:
            assert pages.start in self.used
            return super().save(pages)

    monkeypatch.setattr(executor, "PageCopy", Copy)
    assert store.submit_put(request("a", "b", fill="x")).wait(10) == [None, None]


def test_batches_are_shared_by_the_threads_and_have_so_many_bytes() -> None:
    sizes = []

    class Counted(InDict):
        batch_bytes = 4 * SERIES.format.nbytes

        def read_pages(self, keys: Sequence[bytes], into: Any) -> Any:
            sizes.append(len(keys))
            return super().read_pages(keys, into)

        def write_pages(self, keys: Sequence[bytes], pages: Any) -> Any:
            sizes.append(len(keys))
            return super().write_pages(keys, pages)

    with ExecutedStore(Counted(), name="dict", seal=SEAL) as store:
        for names, expected in (("abcdef", [3, 3]), ("abcdefghijklmno", [3, 4, 4, 4]), ("ab", [])):
            pages = request(*names, fill="x")
            for submit in (store.submit_put, store.submit_get):
                sizes.clear()
                assert not any(submit(pages).wait(5))
                assert sorted(sizes) == expected


def test_a_batch_that_fails_in_the_middle_costs_no_page(store: ExecutedStore, inner: InDict) -> None:
    """Its other pages are read and written alone."""
    names = "abcdefgh"
    for call in ("write", "read"):
        left = [LOST]

        def gate(name: str, key: bytes, call: str = call, left: list[OSError] = left) -> None:
            if name == call and key == request("c").keys[0] and left:
                raise left.pop()

        inner.gate = gate
        pages = request(*names, fill="x")
        submit = store.submit_put if call == "write" else store.submit_get
        assert not any(submit(pages).wait(5))
        assert not left
    pages = request(*names, "absent")
    assert store.submit_get(pages).wait(5) == [None] * 8 + [MissReason.ABSENT]
    assert bytes(pages.memory.rows().row(7)) == b"x" * 64


def test_a_cancelled_job_requests_no_further_page(store: ExecutedStore, inner: InDict) -> None:
    with inner.held_up():
        job = store.submit_get(request(*"abcdef"))
        until(lambda: len(inner.calls) == 2)
        job.cancel()
        assert job.wait(5) == [MissReason.CANCELLED] * 6
    assert store.submit_get(request("g")).wait(5) == [MissReason.ABSENT]
    assert [call for call, _ in inner.calls].count("read") == 3


def test_a_store_that_was_closed_keeps_no_memory_of_its_callers(store: ExecutedStore) -> None:
    pages = request("a", fill="x")
    memory = weakref.ref(pages.memory)
    assert store.submit_put(pages).wait(5) == [None]
    del pages
    store.close()
    gc.collect()
    assert memory() is None


def test_memory_that_cannot_be_used_does_not_count_as_a_fault_of_the_store(store: ExecutedStore) -> None:
    pages = request("a", fill="x")

    class Refusing(HeldMemory):
        def hold(self, pages: range) -> Any:
            raise ValueError("the engine took its cache away")

    refused = attrs.evolve(pages, memory=Refusing(pages.memory))
    for _ in range(3):
        assert store.submit_put(refused).wait(5) == [PutReason.OTHER]
    assert store.submit_put(pages).wait(5) == [None], "it was left alone as if it had failed"


def test_jobs_take_turns_page_by_page_and_lookups_go_first() -> None:
    inner = InDict()
    inner.num_threads = 1
    store = ExecutedStore(inner, name="dict", seal=SEAL)
    first = request("first")
    with store, inner.held_up(first.keys):
        jobs = [store.submit_get(first)]
        until(lambda: inner.calls)
        long, short = request(*"abcdefgh"), request(*"xy")
        jobs += [store.submit_get(long), store.submit_get(short)]
        look = store.submit_lookup(request("z").keys)
        inner.opened.set()
        for job in jobs:
            job.wait(5)
        order = [key for call, key in inner.calls[1:] if call == "read" or key == request("z").keys[0]]
        assert look.done and order[0] == request("z").keys[0]
        assert order[1:5] == [long.keys[0], short.keys[0], long.keys[1], short.keys[1]]


def test_a_store_that_fails_is_a_miss_and_is_tried_again_after_a_while(
    store: ExecutedStore, inner: InDict, caplog: pytest.LogCaptureFixture
) -> None:
    inner.gate = failing(ConnectionError("no route to it"))
    wanted = request("a")
    assert store.submit_get(wanted).wait(5) == [MissReason.STORE_GONE]
    assert store.submit_get(wanted).wait(5) == [MissReason.STORE_GONE]
    assert store.submit_put(wanted).wait(5) == [PutReason.STORE_GONE]
    assert store.submit_lookup(wanted.keys).wait(5) == [Presence.ABSENT]
    assert len(inner.calls) == 2, "it is left alone until the back-off is over"
    inner.gate = lambda call, key: None
    until(lambda: store.submit_get(wanted).wait(5) == [MissReason.ABSENT])
    assert store.submit_put(wanted).wait(5) == [None]
    (warning,) = warnings_in(caplog)
    assert "no route to it" in warning


def test_a_page_that_alone_is_lost_has_its_reason_and_the_store_is_not_taken_for_gone(
    store: ExecutedStore, inner: InDict, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.submit_put(request("a", "b", fill="x")).wait(5) == [None, None]

    def gate(call: str, key: bytes) -> None:
        if call in ("read", "write") and key == foreign_key(b"test", b"a"):
            raise BlockingStore.PageError(MissReason.TIMEOUT, "its holder does not answer")
        if call == "has":
            raise BlockingStore.PageError(MissReason.TIMEOUT)

    inner.gate = gate
    for _ in range(3):
        assert store.submit_get(request("a", "b")).wait(5) == [MissReason.TIMEOUT, None]
        assert store.submit_put(request("a", "c", fill="y")).wait(5) == [PutReason.TIMEOUT, None]
        assert store.submit_lookup(request("b").keys).wait(5) == [Presence.ABSENT]
    assert not caplog.records


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_page_that_cannot_be_read_is_missed_alone_and_not_promised_until_it_is_replaced(
    store: ExecutedStore, inner: InDict, caplog: pytest.LogCaptureFixture
) -> None:
    pages = request("a", "b", "c", fill="x")
    store.submit_put(pages).wait(5)
    inner.gate = failing(LOST, "b", "c", calls=["read"])
    for expected in (MissReason.UNREADABLE, MissReason.UNREADABLE):
        assert store.submit_get(request("a", "b", "c")).wait(5) == [None, expected, expected]
        assert store.submit_lookup(pages.keys).wait(5) == [Presence.HELD, Presence.ABSENT, Presence.ABSENT]
        assert store.submit_put(request("b", fill="y")).wait(5) == [PutReason.UNREADABLE]
    inner.gate = lambda call, key: None
    assert store.submit_lookup(pages.keys).wait(5)[1] == Presence.ABSENT
    again = request("b", fill="y")
    assert store.submit_put(again).wait(5) == [None]
    assert store.submit_lookup(pages.keys).wait(5) == [Presence.HELD, Presence.HELD, Presence.ABSENT]
    assert store.submit_get(again).wait(5) == [None] and content(again) == [b"y"]


@pytest.mark.parametrize("bad", [1, 7, 20])
def test_a_key_that_cannot_be_looked_up_hides_no_other(store: ExecutedStore, inner: InDict, bad: int) -> None:
    names = [f"page {number}" for number in range(20)]
    pages = request(*names, fill="x")
    store.submit_put(pages).wait(5)
    has = inner.has

    def each(keys: Sequence[bytes]) -> list[bool]:
        if not set(keys).isdisjoint(pages.keys[:bad]):
            raise RuntimeError("a name that the library does not like")
        return has(keys)

    inner.has = each  # type: ignore[method-assign]
    found = store.submit_lookup(pages.keys).wait(5)
    assert found == [Presence.ABSENT] * bad + [Presence.HELD] * (20 - bad)


def test_a_connection_that_was_lost_and_is_there_again_costs_no_page(
    store: ExecutedStore, inner: InDict, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[str] = []

    def gate(call: str, key: bytes) -> None:
        if call not in failures and call != "has":
            failures.append(call)
            raise OSError(errno.EPIPE + 1000, "a message of the library about a lost connection")

    inner.gate = gate
    assert store.submit_put(request("a", fill="x")).wait(5) == [None]
    assert store.submit_get(request("a")).wait(5) == [None]
    assert failures == ["write", "read"] and not caplog.records


def test_a_write_that_fails_is_of_its_page_and_a_full_disk_is_no_room(
    store: ExecutedStore, inner: InDict, caplog: pytest.LogCaptureFixture
) -> None:
    for error, reason in (
        (OSError(errno.EIO, "input/output error"), PutReason.OTHER),
        (OSError(errno.ENOSPC, "no space left on device"), PutReason.NO_ROOM),
        (OSError(errno.ETIMEDOUT, "timed out"), PutReason.TIMEOUT),
    ):
        inner.gate = failing(error, "bad", calls=["write"])
        for _ in range(2):
            assert store.submit_put(request("a", "bad", "b", fill="x")).wait(5) == [None, reason, None]
    assert len(warnings_in(caplog)) == 3


@pytest.mark.parametrize("timeout", [10.0, 0.1])
def test_a_write_under_way_is_undone_before_a_removal_is_done(
    store: ExecutedStore, inner: InDict, timeout: float
) -> None:
    """With a timeout of 0.1 s the put is over when the page is removed, and its write is not."""
    with inner.held_up(call="write"):
        put = store.submit_put(request("a", fill="x"), timeout=timeout)
        until(lambda: inner.calls)
        if timeout < 1:
            assert put.wait(5) == [PutReason.TIMEOUT]
        removal = store.submit_remove(request("a").keys)
        until(lambda: ("remove", request("a").keys[0]) in inner.calls)
        with pytest.raises(TimeoutError):
            removal.wait(0.05)
    assert removal.wait(5) == [True] and not inner.pages
    assert put.wait(5) == [PutReason.TIMEOUT if timeout < 1 else PutReason.CANCELLED]


def test_a_write_that_cannot_be_undone_fails_the_removal(store: ExecutedStore, inner: InDict) -> None:
    def gate(call: str, key: bytes) -> None:
        if call == "write":
            inner.opened.wait(20)
        elif len(inner.calls) > 2:
            raise OSError("the disk is gone")

    inner.gate = gate
    store.submit_put(request("a", fill="x"))
    until(lambda: inner.calls)
    removal = store.submit_remove(request("a").keys)
    until(lambda: len(inner.calls) == 2)
    inner.opened.set()
    assert removal.wait(5) == [False]


def test_a_store_that_may_not_be_written_reports_it_and_is_not_taken_for_gone(
    store: ExecutedStore, inner: InDict
) -> None:
    inner.gate = failing(PermissionError("read-only"), calls=["write"])
    for _ in range(3):
        assert store.submit_put(request("a")).wait(5) == [PutReason.READ_ONLY]


@pytest.mark.parametrize("error", [UnsupportedError("never"), PermissionError("read-only")])
def test_a_store_that_cannot_remove_reports_it_and_is_not_taken_for_gone(
    store: ExecutedStore, inner: InDict, error: Exception
) -> None:
    inner.gate = failing(error, calls=["remove"])
    assert store.submit_remove(request("a").keys).wait(5) == [False]
    assert store.submit_put(request("a")).wait(5) == [None]
    inner.pages[request("a").keys[0]] = b"wrong"
    assert store.submit_get(request("a")).wait(5) == [MissReason.FORMAT], "and the page stays"
    assert store.submit_lookup(request("a").keys).wait(5) == [Presence.ABSENT], "it is not promised again"
    assert store.submit_put(request("a")).wait(5) == [PutReason.UNREADABLE]


def test_its_alarms_have_stable_fields(
    store: ExecutedStore, inner: InDict, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        inner.pages[request("a").keys[0]] = b"wrong"
        store.submit_get(request("a")).wait(5)
        inner.gate = failing(OSError("broken"), calls=["write"])
        store.submit_put(request("a")).wait(5)
        inner.gate = failing(ConnectionError("no route to it"))
        store.submit_get(request("a")).wait(5)
        inner.gate = lambda call, key: None
        until(lambda: store.submit_get(request("a")).wait(5) == [MissReason.ABSENT])
    found = [vars(record) for record in caplog.records]
    assert [each["event"] for each in found] == [
        *("wrong_page", "store_error", "store_failed", "store_answers")
    ]
    assert {each["store"] for each in found} == {store.name}
    assert found[0]["reason"] == "format" and type(found[0]["reason"]) is str
    assert "broken" in found[1]["error"] and "no route to it" in found[2]["error"]


def test_a_store_that_stops_answering_in_the_middle_of_a_lookup_is_gone() -> None:
    calls: list[int] = []

    class Stopping(InDict):
        def has(self, keys: Sequence[bytes]) -> list[bool]:
            calls.append(len(keys))
            if len(calls) == 1:
                raise ValueError("a key that it cannot look for")
            if len(calls) == 2:
                return [False]  # it is there
            raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer"):
        page_calls.PageCalls(Stopping(), "stopping").has(
            [number.to_bytes(32, "big") for number in range(1000)]
        )
    assert len(calls) < 8
