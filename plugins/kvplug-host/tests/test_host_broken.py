"""The program that has the pages is killed, or stopped, at each step of a put and a get by another one; and
another one gives up what it has begun."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from host_programs import config
from kvplug import build_store
from kvplug.assembly.stores import serve_store
from kvplug.transport import (
    MissReason,
    Outbox,
    PageBuffers,
    PageEvent,
    PageFormat,
    PageRequest,
    PageRows,
    Presence,
    PutReason,
    Series,
    Store,
)
from kvplug.transport.store.format import Part, opaque_format
from kvplug.transport.store.keys import foreign_key
from kvplug_host import protocol
from kvplug_host.client.page_pipe import PagePipe
from kvplug_host.client.piped_get import PipedGet
from kvplug_host.client.put_memory import PutMemory
from kvplug_host.client.put_turns import PutTurns
from kvplug_host.client.requests import Requests
from kvplug_host.protocol import MAX_KEYS, MAX_PUTS, REGIONS
from kvplug_host.serving.arrivals import Arrival
from kvplug_host.serving.server import Server
from kvplug_host.store import HostStore
from kvplug_lab.named_pages import NamedPages
from kvplug_testing import peers, waits
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import until

PROGRAMS = Path(__file__).with_name("host_programs.py")
PAGES = NamedPages(200_000)
JOB_S = 1.0
SLACK_S = 5.0
STEPS = (
    (Outbox, "send"),
    (Requests, "answered"),
    (PagePipe, "send_rows"),
    (PipedGet, "arrived"),
)
"""What the other end does for a request: each call is a step, and so is what follows it."""
MISSES = {MissReason.STORE_GONE, MissReason.TIMEOUT, MissReason.ABSENT}
NOT_KEPT = {PutReason.STORE_GONE, PutReason.TIMEOUT}

_numbers = itertools.count()


class Steps:
    """Counts the steps of this process, and calls ``act`` right before the chosen one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = -1
        self._act: Callable[[], None] = lambda: None
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def choose(self, number: int, act: Callable[[], None]) -> None:
        self._left, self._act = number, act

    @property
    def was_reached(self) -> bool:
        return self._left < 0

    def _counted(self, call: Any) -> Any:
        def counted(*args: Any, **given: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                self._act()
            return call(*args, **given)

        return counted


def names(name: str, count: int = 3) -> list[str]:
    return [f"{name} {number}" for number in range(count)]


@contextmanager
def in_time() -> Iterator[None]:
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert took < JOB_S + SLACK_S, f"it took {took:.1f} s, and its deadline was at {JOB_S:.1f} s"


def put(store: Store, name: str) -> list[PutReason | None]:
    with in_time():
        job = store.submit_put(PAGES.request(store, *names(name)), timeout=JOB_S)
        return list(job.wait(waits.patience_s))


def get(store: Store, name: str) -> list[MissReason | None]:
    """The results; each page that was got is right."""
    with in_time():
        return PAGES.got(store, *names(name), timeout=JOB_S)


def works(store: Store, name: str) -> bool:
    return put(store, name) == get(store, name) == [None] * 3


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["killed", "stopped"])
@pytest.mark.parametrize("transport", ["mapped", "shm", "cpu"])
def test_at_each_step_the_jobs_end_in_time_without_a_wrong_byte(
    monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer, transport: str, way: str
) -> None:
    options: dict[str, Any] = {} if transport == "mapped" else {"map": False, "transport": transport}
    steps = Steps(monkeypatch)
    for number in range(100):
        address = f"unix:@kvplug-broken-{os.getpid()}-{next(_numbers)}"

        def serving(stack: ExitStack, address: str = address) -> peers.Peer:
            program = stack.enter_context(fork_server.start(f"{PROGRAMS}:serve", address, {"size": 16 << 20}))
            assert program.recv(waits.patience_s) == address
            return program

        with ExitStack() as stack:
            program = serving(stack)
            store = build_store(config(contact=address, **options))
            stack.callback(store.abort)
            until(lambda store=store: works(store, "before"), what="that the store is used")
            steps.choose(number, program.kill if way == "killed" else program.stop)
            assert set(put(store, "pages")) <= {None, *NOT_KEPT}
            assert set(get(store, "pages")) <= {None, *MISSES}
            if not steps.was_reached:
                break
            if way == "killed":
                serving(stack)
            else:
                program.cont()
            until(lambda store=store: works(store, "after"), what="that the store is used again")
    assert number > 3, "a put and a get had hardly a step"


@contextmanager
def served(address: str = "", **options: Any) -> Iterator[tuple[Store, Store]]:
    """A store that this process serves, and the end of another program that uses it."""
    address = address or f"unix:@kvplug-broken-{os.getpid()}-{next(_numbers)}"
    options = {"size": 16 << 20, "segment_bytes": 1 << 20, **options}
    with (
        serve_store(config(**options), address=address) as server,
        build_store(config(contact=address, **options)) as store,
    ):
        until(lambda: works(store, "before"), what="that the store is used")
        yield server.store, store


@pytest.mark.parametrize("way", ["has no time", "never says that it is done", "is done before it reads"])
def test_reads_that_were_given_up_leave_nothing(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    send, held = Outbox.send, {}

    def sent(outbox: Outbox, message: dict[str, Any]) -> bool:
        if way == "never says that it is done" and message.get("op") == "done":
            return True
        if way == "is done before it reads":
            if message.get("op") == "read":
                held[message["id"]] = message
                return True
            if message.get("op") == "done" and (read := held.pop(message["id"], None)) is not None:
                return send(outbox, message) and send(outbox, read)
        return send(outbox, message)

    with served() as (_, store):
        assert store.route == "its memory is mapped"
        request = PAGES.request(store, *names("before"), fill=b"?")
        gc.collect()
        before = len(gc.get_objects())
        monkeypatch.setattr(Outbox, "send", sent)
        timeout = 0.0 if way == "has no time" else 0.2
        for _ in range(20):
            for job in [store.submit_get(request, timeout=timeout) for _ in range(100)]:
                job.wait(waits.patience_s)
                assert job.wait_settled(waits.patience_s)
        del job

        def more() -> int:
            gc.collect()
            return len(gc.get_objects()) - before

        until(lambda: more() < 500, what="that nothing is left of 2,000 reads")


def test_two_pages_of_2_mib_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, send = NamedPages(2 << 20), PagePipe.send_rows
    sent: list[int] = []

    def counted(pipe: PagePipe, request: int, first: int, rows: int, *more: Any) -> None:
        sent.append(rows)
        send(pipe, request, first, rows, *more)

    with served(map=False, size=64 << 20, segment_bytes=16 << 20) as (_, store):
        monkeypatch.setattr(PagePipe, "send_rows", counted)
        request = pages.request(store, *names("large", 6))
        assert store.submit_put(request).wait(waits.patience_s) == [None] * 6
    assert sent == [2, 2, 2]


@pytest.mark.parametrize("stops", ["before a message", "in a message"])
def test_pages_that_are_announced_and_not_sent_take_no_memory(
    monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    asked: set[int] = set()

    def send_rows(pipe: PagePipe, request: int, first: int, rows: int, *_: Any) -> None:
        if stops == "in a message" and not asked:
            pipe.pipe.send_tensor(protocol.tag(request, first, rows), timeout=None)
        asked.add(request)

    with served(map=False) as (held, store):
        full = PAGES.request(held, *names("full", 75))
        assert held.submit_put(full).wait(waits.patience_s) == [None] * 75
        before = held.usage()
        assert before.used_bytes > 0.9 * (16 << 20)
        with monkeypatch.context() as patch:
            patch.setattr(PagePipe, "send_rows", send_rows)
            for number in range(20):
                request = PAGES.request(store, *names(f"not sent {number}", 20))
                store.submit_put(request, timeout=2 * waits.patience_s)
            until(lambda: len(asked) == MAX_PUTS, what="that as many puts are under way as there may be")
        assert held.usage() == before
        assert works(held, "room")


def test_a_process_with_more_puts_under_way_than_agreed_loses_its_link_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(map=False) as (held, store):
        monkeypatch.setattr(PagePipe, "send_rows", lambda *_: None)
        monkeypatch.setattr(PutTurns, "take", lambda *_: True)
        requests = [PAGES.request(store, *names(f"not sent {number}", 20)) for number in range(20)]
        jobs = [store.submit_put(request, timeout=2 * waits.patience_s) for request in requests]
        assert jobs[0].wait(waits.patience_s) == [PutReason.STORE_GONE] * 20
        assert works(held, "room")


def test_a_message_of_more_pages_than_agreed_ends_that_link_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(map=False) as (held, store):
        monkeypatch.setattr("kvplug_host.client.remote_put.PUT_STEP_BYTES", 1 << 30)
        request = PAGES.request(store, *names("many", 40))
        assert store.submit_put(request).wait(waits.patience_s) == [PutReason.STORE_GONE] * 40
        assert "not agreed on" in caplog.text
        assert works(held, "room")


def test_pages_that_the_store_has_by_the_time_they_come_count_as_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = PagePipe.send_rows

    def late(*args: Any) -> None:
        assert PAGES.put(held, *names("page")) == [None] * 3
        send(*args)

    with served(map=False) as (held, store):
        monkeypatch.setattr(PagePipe, "send_rows", late)
        assert PAGES.put(store, *names("page")) == [None] * 3
        assert PAGES.got(store, *names("page")) == [None] * 3


def test_a_put_of_more_than_a_quarter_of_the_store_is_kept_whole() -> None:
    with served(map=False) as (_, store):
        requests = [PAGES.request(store, *names(f"large {number}", 20)) for number in range(3)]
        jobs = [store.submit_put(request, timeout=30) for request in requests]
        assert [job.wait(waits.patience_s) for job in jobs] == [[None] * 20] * 3


def test_a_put_goes_on_when_one_that_the_store_did_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store reads nothing for a while, so that the request of one put is refused. Another one waits for
    its turn."""
    send = Outbox.send
    jobs: list[Any] = []

    def sent(outbox: Outbox, message: dict[str, Any]) -> bool:
        if message.get("op") != "put" or jobs:
            return send(outbox, message)
        jobs.append(store.submit_put(next_pages, timeout=JOB_S))
        return False

    monkeypatch.setattr(protocol, "MAX_PUTS", 1)
    with served(map=False) as (_, store):
        pages, next_pages = (PAGES.request(store, *names(name, 20)) for name in ("refused", "next"))
        monkeypatch.setattr(Outbox, "send", sent)
        with in_time():
            assert store.submit_put(pages, timeout=30).wait(20) == [PutReason.STORE_GONE] * 20
            assert jobs[0].wait(20) == [None] * 20


def test_a_page_that_comes_after_its_put_was_given_up_and_removed_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(map=False) as (held, store):
        assert isinstance(held, HostStore)
        publish = held.pages.publish
        has_come, is_removed, is_published = (threading.Event() for _ in range(3))

        def published(*args: Any) -> None:
            has_come.set()
            assert is_removed.wait(waits.patience_s)
            publish(*args)
            is_published.set()

        monkeypatch.setattr(held.pages, "publish", published)
        request = PAGES.request(store, "page")
        job = store.submit_put(request)
        assert has_come.wait(waits.patience_s)
        job.cancel()
        assert store.submit_remove(request.keys).wait(waits.patience_s) == [True]
        is_removed.set()
        assert is_published.wait(waits.patience_s)
        assert held.submit_lookup(request.keys).wait(waits.patience_s) == [Presence.ABSENT]


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """In the block, the store does not read lent memory. Yields the number of pages in each message that
    waits."""
    keep, may_go, waiting = Arrival.keep, threading.Event(), list[int]()

    def kept(arrival: Arrival, numbers: Sequence[int], rows: PageRows) -> None:
        waiting.append(len(numbers))
        assert may_go.wait(waits.patience_s)
        keep(arrival, numbers, rows)

    monkeypatch.setattr(Arrival, "keep", kept)
    try:
        yield waiting
    finally:
        may_go.set()


def test_lent_memory_is_written_again_only_when_the_store_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checksums are off, and the store does not learn that a put was given up while it reads the pages."""
    send = Outbox.send

    def sent(outbox: Outbox, message: dict[str, Any]) -> bool:
        return message.get("op") == "cancel" or send(outbox, message)

    with served(size=256 << 20, integrity="off") as (held, store):
        monkeypatch.setattr(Outbox, "send", sent)
        with held_up(monkeypatch) as waiting:
            given_up = store.submit_put(PAGES.request(store, *names("given up", 10)))
            until(lambda: waiting, what="that the store reads")
            given_up.cancel()
            later = [
                store.submit_put(PAGES.request(store, *names(f"later {at}", 20))) for at in range(REGIONS)
            ]
            assert not later[-1].wait_settled(0.3)
        for job in later:
            assert job.wait(waits.patience_s) == [None] * 20
        assert PAGES.got(held, *names("given up", 10)) == [None] * 10
        for at in range(REGIONS):
            assert PAGES.got(store, *names(f"later {at}", 20)) == [None] * 20


def test_a_put_that_waits_for_lent_memory_ends_with_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplug_host.client.client._CLOSE_S", 600.0)
    take, calls = PutMemory.take, list[int]()

    def taken(memory: PutMemory, nbytes: int) -> tuple[int, memoryview] | None:
        calls.append(nbytes)
        return take(memory, nbytes)

    with served(size=256 << 20) as (_, store), held_up(monkeypatch):
        monkeypatch.setattr(PutMemory, "take", taken)
        job = store.submit_put(PAGES.request(store, *names("many", 40 * REGIONS)), timeout=600)
        until(lambda: len(calls) > REGIONS, what="that a thread waits for a region")
        waits.Call(store.abort).result()
        assert None not in job.wait(waits.patience_s)


@pytest.mark.parametrize("is_lent", [True, False])
def test_a_store_that_is_sent_to_wrong_memory_ends_that_link_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_lent: bool
) -> None:
    def send_rows(pipe: PagePipe, request: int, first: int, rows: int, *_: Any) -> None:
        pipe.pipe.send_tensor(protocol.tag(request, first, rows, 1), timeout=None)

    if not is_lent:
        monkeypatch.setattr(PagePipe, "lend", lambda *_: None)
    with served(size=64 << 20, segment_bytes=16 << 20) as (held, store):
        monkeypatch.setattr(PagePipe, "send_rows", send_rows)
        pages = NamedPages(12 << 20)  # more than a region
        assert store.submit_put(pages.request(store, "page")).wait(waits.patience_s) == [PutReason.STORE_GONE]
        assert ("do not lie in" if is_lent else "has not lent") in caplog.text
        assert pages.put(held, "page") == [None]


def test_many_small_pages_are_put_and_got_whatever_their_headers_take() -> None:
    """The headers of these pages do not fit into one message, nor do the keys of the others."""
    many_layers = PageFormat(
        page_tokens=0, num_layers=1000, parts=(Part(name="a", dtype="uint8", shape=(8,)),)
    )
    with served(map=False, size=64 << 20) as (_, store):
        for form, count in ((many_layers, 2_500), (opaque_format(8), MAX_KEYS + 1)):
            identities = [b"%d" % number for number in range(count)]
            memory = PageBuffers.empty(form, count)
            pages = PageRequest(
                series=Series(form, b"", store.seal.id),
                keys=[foreign_key(b"many", identity) for identity in identities],
                identities=identities,
                memory=memory,
            )
            assert {*store.submit_put(pages).wait(waits.patience_s)} == {None}
            if count <= MAX_KEYS:
                assert {*store.submit_get(pages).wait(waits.patience_s)} == {None}


def test_a_listener_that_fails_ends_neither_the_link_nor_the_other_listeners() -> None:
    with served(map=False) as (_, store):
        seen: list[PageEvent] = []
        others: list[PageEvent] = []

        def fails(event: PageEvent) -> None:
            seen.append(event)
            raise ValueError("a fault of the listener")

        store.subscribe(fails)
        store.subscribe(others.append)
        assert works(store, "after")
        until(lambda: any(event.kind == "stored" and len(event.keys) == 3 for event in others[2:]))
        assert len(seen) == 1


def test_a_listener_gets_the_pages_of_one_declaration_in_one_event() -> None:
    with served(map=False) as (held, store):
        series, keys = Series(opaque_format(8), b"", held.seal.id), [b"%032d" % at for at in range(1000)]
        held.declare(series, keys, timeout=600)
        events: list[PageEvent] = []
        for each in (held, store):
            each.subscribe(events.append)

        def declared() -> list[int]:
            return [len(event.keys) for event in events if event.kind == "declared"]

        until(lambda: sum(declared()) == 2 * len(keys))
        assert declared() == [1000, 1000]


def test_a_store_that_hangs_up_again_and_again_is_not_tried_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvplug_host.client.contact._BACKOFF_S", (600.0, 600.0))
    serve, links = Server.serve, []

    def served_link(server: Server, link: Store.Link) -> None:
        links.append(link)
        serve(server, link)

    monkeypatch.setattr(Server, "serve", served_link)
    with served(map=False) as (_, store):
        for _ in range(1100):  # more than it permits
            store.subscribe(lambda event: None)
        with pytest.raises(waits.DeadlineError):
            until(lambda: len(links) > 2, within=1.0)
