"""The store "mooncake" with a real master and real holders: what the kit does not know of."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_process import free_port, listens, stopped

from kvplug import ConfigError
from kvplug.transport import BlockingStore, Deadline, MissReason, PutReason, Store
from kvplug_mooncake.landing import LateError
from kvplug_mooncake.probe import probe
from kvplug_mooncake.protocol import MARK, Get, Outcome, Put
from kvplug_testing import check_plugin, peers, waits
from mooncake_pool import Pool
from mooncake_stores import PAGES, build, die_with_a_store, got, inside, process_of, put, request

NAMES = [f"page {number}" for number in range(24)]
SECRET = "0123456789abcdef0123456789abcdef"
SOON_S = 0.7
SLACK_S = 1.5
needs_mooncake = pytest.mark.skipif(not probe().viable, reason=probe().reason or "Mooncake is installed")
LOST = {MissReason.TIMEOUT, MissReason.STORE_GONE, MissReason.ABSENT}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One holder that lives as long as the tests of this module."""
    pool = Pool(tmp_path_factory.mktemp("pool"), "--put_start_discard_timeout_sec=1")
    yield pool
    pool.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pool]:
    """Two holders of its own for a test."""
    pool = Pool(tmp_path, holders=2, segment_bytes=64 << 20)
    yield pool
    pool.close()


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    """Makes stores, which are aborted after the test."""
    with contextlib.ExitStack() as stack:

        def make(pool: Pool | str, **given: Any) -> Store:
            store = build(pool if isinstance(pool, str) else pool.address, **given)
            stack.callback(store.abort)
            return store

        yield make


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("mooncake") == ()


def test_a_page_that_is_removed_as_soon_as_it_is_there_was_put(opened: Any, pool: Pool) -> None:
    store, other = opened(pool), opened(pool)
    removing = threading.Event()

    def remove() -> None:
        while not removing.is_set():
            other.submit_remove(request(other, "removed").keys).wait(5)

    thread = waits.Call(remove)
    try:
        assert {*(put(store, "removed")[0] for _ in range(100))} == {None}
    finally:
        removing.set()
        thread.result()


# -- holders and masters that are lost -----------------------------------------------------------


def test_a_killed_holder_costs_its_pages_and_no_time(opened: Any, pair: Pool) -> None:
    store = opened(pair)
    assert not any(put(store, *NAMES))
    pair.holders[0].kill()
    began = time.monotonic()
    found = got(store, *NAMES)
    assert time.monotonic() - began < SLACK_S
    assert None in found and found.count(None) < len(found), "no page was lost, or every one"
    assert set(found) <= {None, *LOST}
    later = [f"later {number}" for number in range(8)]
    waits.until(lambda: not any(put(store, *later)), 20, "that the master has noticed")
    assert not any(got(store, *later))


def test_a_stopped_holder_holds_up_no_request_and_not_the_pages_of_others(opened: Any, pair: Pool) -> None:
    store = opened(pair)
    assert not any(put(store, *NAMES))
    with stopped(pair.holders[0]):
        began = time.monotonic()
        assert MissReason.TIMEOUT in got(store, *NAMES, timeout=SOON_S)
        assert time.monotonic() - began < SOON_S + SLACK_S
        waits.until(lambda: not inside(store).client.num_late, 5, "that calls end in Mooncake")
        began = time.monotonic()
        found = got(store, *NAMES)
        assert time.monotonic() - began < SLACK_S, "a holder that did not answer is asked again"
        assert set(found) == {None, MissReason.TIMEOUT}
        assert store.submit_lookup(request(store, *NAMES).keys).wait(5)
    waits.until(lambda: not any(got(store, *NAMES)), 20, "the pages of the holder that goes on")


def test_a_holder_that_is_stopped_when_a_client_first_needs_it_is_found_out_as_well(
    opened: Any, pair: Pool
) -> None:
    """Mooncake's own limits do not hold there: a call takes a minute."""
    first = opened(pair)
    assert not any(put(first, *NAMES))
    store = opened(pair)
    client = inside(store).running()
    with stopped(pair.holders[0]):
        began = time.monotonic()
        found = got(store, *NAMES)
        assert time.monotonic() - began < 1.5 + 2 * SLACK_S
        assert set(found) == {None, MissReason.TIMEOUT}
        assert found == got(store, *NAMES), "a page of the other holder was missed"
        assert client.num_late and inside(store).client is client, "the client was replaced"


def test_a_late_write_reaches_no_page_of_another_call(opened: Any, pair: Pool) -> None:
    """A call is given up, its holder goes on, and its bytes come: into memory that is not lent again."""
    scout, names = opened(pair), NAMES[:12]
    assert not any(put(scout, *names))
    with stopped(pair.holders[1]):
        others = [name for name in names if got(scout, name, timeout=0.3) != [None]]
    scout.abort()
    assert 0 < len(others) < len(names)
    store = opened(pair, timeout_s=3, landing_bytes=1 << 20)
    client = inside(store).running()
    nbytes = PAGES.nbytes * 2
    with stopped(pair.holders[1]):
        late = request(store, others[0]).keys[0]
        with client.lent(nbytes, Deadline.after(1)) as slot:
            slot.view[:] = b"\xee" * nbytes
            with pytest.raises(LateError):
                client.call(lambda number: Get(number, late, slot.at, nbytes), Deadline.after(SOON_S), slot)
            slot.view[:] = b"\xee" * nbytes
        assert client.num_late == 1
        with pytest.raises(LateError):
            client.landing.take(client.landing.nbytes, Deadline.after(0))
        rest = [name for name in names if name not in others]
        assert not any(got(store, *rest)), "the rest of the area is not used"
    waits.until(lambda: not client.num_late, 10, "the end of the late call")
    came = client.landing.memory[slot.at : slot.at + len(MARK)]
    assert came == MARK, "nothing came late, and the test shows nothing"
    assert client.landing.take(client.landing.nbytes, Deadline.after(1)).at == 0, "the slot did not come back"


def test_calls_that_do_not_end_are_bounded_and_the_client_is_replaced(
    opened: Any, pair: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(pair, timeout_s=20, lanes=1)
    assert not any(put(store, *NAMES))
    before = process_of(store)
    with stopped(pair.holders[0]), stopped(pair.holders[1]):
        inside(store).timeout_s = 0.3  # the client's own limit is later
        for name in NAMES[:2]:
            assert got(store, name) == [MissReason.TIMEOUT]
        waits.until(lambda: not before.is_running(), 5, "the end of the client whose lanes are full")
    assert "is replaced" in caplog.text
    inside(store).timeout_s = 5
    waits.until(lambda: got(store, NAMES[0]) == [None], 10, "a client that works")


def test_a_client_that_is_killed_or_stopped_is_replaced(opened: Any, pool: Pool) -> None:
    store = opened(pool)
    assert put(store, "of a client") == [None]
    for what, reason in ((signal.SIGKILL, MissReason.STORE_GONE), (signal.SIGSTOP, MissReason.TIMEOUT)):
        before = process_of(store)
        before.send_signal(what)
        began = time.monotonic()
        assert set(got(store, "of a client")) <= {reason, None}
        assert time.monotonic() - began < 5
        waits.until(lambda: got(store, "of a client") == [None], 10, "a client that works")
        assert process_of(store).pid != before.pid
        assert not before.is_running()


def test_a_put_whose_client_is_killed_leaves_no_page_and_can_be_done_again(opened: Any, pool: Pool) -> None:
    store = opened(pool)
    assert put(store, "before") == [None]
    with stopped(pool.holders[0]):
        job = store.submit_put(request(store, "half", nbytes=8 << 20, fill=b"one"), timeout=5)
        time.sleep(0.3)
        process_of(store).kill()
        assert job.wait(10) != [None]
    assert set(got(store, "half", nbytes=8 << 20, fill=b"one")) <= LOST
    again = {"nbytes": 8 << 20, "fill": b"other"}
    waits.until(lambda: put(store, "half", **again) == [None], 20, "the master gives the dead writer up")
    assert got(store, "half", **again) == [None]


@needs_mooncake
def test_a_missing_master_is_named_at_once_and_found_when_it_comes(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    store = opened(f"127.0.0.1:{port}")
    began = time.monotonic()
    assert got(store, "a") == [MissReason.STORE_GONE]
    assert time.monotonic() - began < 3
    assert f"no Mooncake master at 127.0.0.1:{port} (Connection refused)" in caplog.text
    assert "options.mooncake.master" in caplog.text


def test_a_master_that_is_stopped_ends_requests_in_time(opened: Any, pair: Pool) -> None:
    store = opened(pair)
    assert put(store, "a") == [None]
    with stopped(pair.master):
        began = time.monotonic()
        assert got(store, "a", timeout=SOON_S) == [MissReason.TIMEOUT]
        assert time.monotonic() - began < SOON_S + SLACK_S
    waits.until(lambda: got(store, "a") == [None], 15, "the master that goes on")


def test_a_master_that_was_replaced_is_used_again(opened: Any, pair: Pool) -> None:
    store = opened(pair)
    assert put(store, "a") == [None]
    pair.master.kill()
    pair.master.wait(10)
    began = time.monotonic()
    assert got(store, "a") == [MissReason.STORE_GONE]
    assert time.monotonic() - began < 3
    pair.server.start()
    waits.until(lambda: put(store, "b") == [None], 30, "that the holders have found the new master")
    assert got(store, "a", "b") == [MissReason.ABSENT, None]


# -- what is left --------------------------------------------------------------------------------


def test_of_a_program_that_is_killed_nothing_is_left(opened: Any, pool: Pool) -> None:
    before = set(os.listdir("/dev/shm"))
    with peers.start(die_with_a_store, pool.address) as peer:
        client = psutil.Process(peer.recv(20))
        peer.kill()
        waits.until(lambda: not client.is_running(), 10, "the end of the client process")
    assert not set(os.listdir("/dev/shm")) - before
    store = opened(pool)
    assert got(store, "of one that dies") == [None]


def test_pages_in_memory_that_a_process_has_added_go_with_it(opened: Any, tmp_path: Path) -> None:
    with contextlib.closing(Pool(tmp_path, holders=0)) as pool:
        holder, store = opened(pool, segment_bytes=64 << 20), opened(pool)
        waits.until(lambda: put(store, "a") == [None], 10, "memory in the pool")
        assert got(store, "a") == [None]
        holder.close()
        assert set(got(store, "a")) <= LOST
        waits.until(lambda: put(store, "b") == [PutReason.NO_ROOM], 10, "the pool to notice")


# -- who may write into it -----------------------------------------------------------------------


def addresses_of_this_host() -> list[str]:
    return [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]


def test_the_ports_that_mooncake_opens_are_closed_to_strangers(opened: Any, pool: Pool) -> None:
    for segment_bytes, at_loopback in ((0, False), (16 << 20, True)):
        store = opened(pool, segment_bytes=segment_bytes)
        assert put(store, f"of {segment_bytes}") == [None]
        ports = {each.laddr.port for each in process_of(store).net_connections() if each.status == "LISTEN"}
        assert len(ports) == 2
        for port in ports:
            assert listens(port) is at_loopback
            for host in addresses_of_this_host():
                assert not listens(port, host), f"{host} reaches memory that Mooncake has registered"
        assert got(store, f"of {segment_bytes}") == [None]
        store.close()


@needs_mooncake
@pytest.mark.parametrize("given", [{"host": "10.0.0.1"}, {"host": "0.0.0.0"}, {}])
def test_other_hosts_are_refused_unless_the_config_permits_it(
    opened: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    master = "10.0.0.2:50051" if not given else "127.0.0.1:1"
    monkeypatch.setenv("KVPLUG_SECRET", SECRET)
    with pytest.raises(ConfigError, match="set allow_unauthenticated_data_plane"):
        opened(master, config=given)
    opened(master, config={**given, "allow_unauthenticated_data_plane": True})


def test_a_value_of_another_program_is_a_miss_and_makes_room(opened: Any, pool: Pool) -> None:
    store = opened(pool)
    client, key = inside(store).running(), request(store, "taken").keys[0]
    with client.lent(1000, Deadline.after(1)) as slot:
        slot.view[:] = b"?" * 1000
        answer = client.call(lambda number: Put(number, key, slot.at, 1000), Deadline.after(3), slot)
    assert answer.outcome is Outcome.DONE
    assert got(store, "taken") in ([MissReason.CORRUPT], [MissReason.FORMAT])
    assert put(store, "taken") == [None]
    assert got(store, "taken") == [None]


def test_a_page_that_does_not_fit_the_landing_area_is_refused_alone(opened: Any, pool: Pool) -> None:
    small, large = opened(pool, landing_bytes=PAGES.nbytes), opened(pool)
    assert put(small, "large", nbytes=2 * PAGES.nbytes) == [PutReason.TOO_LARGE]
    assert put(large, "large", nbytes=2 * PAGES.nbytes) == [None]
    assert got(small, "large", nbytes=2 * PAGES.nbytes) == [MissReason.NO_MEMORY]
    assert put(small, "small", nbytes=PAGES.nbytes // 2) == [None]
    with pytest.raises(BlockingStore.PageError, match=f"landing_bytes is {PAGES.nbytes}"):
        inside(small).read(bytes(32), [memoryview(bytearray(2 * PAGES.nbytes))])


# -- what is missing or wrong --------------------------------------------------------------------


def test_the_probe_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'kvplug-mooncake[cpu]'" in probe().reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    present = {"libc.so.6": "libc6"}
    missing = {"libnone-a.so.1": "libnone-a1", "libnone-b.so.1": "libnone-b1"}
    monkeypatch.setattr("kvplug_mooncake.probe.LIBRARIES", present | missing)
    assert probe().reason.endswith("apt-get install libnone-a1 libnone-b1")
    monkeypatch.setattr("kvplug_mooncake.probe.LIBRARIES", present)
    assert probe().viable


@needs_mooncake
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"master": "a b"}, "master"),
        ({"prefix": "a*"}, "prefix"),
        ({"protocol": "udp"}, "protocol"),
        ({"log_file": "/nowhere/log"}, "log_file: the file cannot be written"),
    ],
)
def test_wrong_options_are_named(opened: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        opened(options.pop("master", "127.0.0.1:1"), **options)
