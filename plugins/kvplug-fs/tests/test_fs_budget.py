"""The budget of the store "fs": one for all processes that use the folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from folders import aside_in, key_of, open_store, page_of, page_path, read, scan, used_in, write
from kvplug.transport.store.folder import ledger as ledger_module, sweeper as sweeper_module
from kvplug.transport.store.folder.files import PageFolder, cost_of
from kvplug.transport.store.folder.ledger import Ledger, Totals
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import Call, until

PAGE = cost_of(10_000)
FOLDERS = str(Path(__file__).with_name("folders.py"))


# -- the ledger ------------------------------------------------------------------------------------


def counted(path: Path) -> Ledger:
    """A ledger of a folder that was found to be empty."""
    ledger = Ledger(str(path))
    ledger.correct(Totals(), used_bytes=0, num_pages=0)
    return ledger


NOW = time.time()
DAMAGED = [
    b"",
    b"short",
    b"x" * 44,
    b"x" * 100,
    Totals(1, 1, 1, 1.0).encoded()[:-1] + b"?",
    *(
        Totals(*values).encoded()
        for values in (
            (1, 1, 2**63 - 1, 1.0),
            (2**62, 1, 1, NOW),
            (1 << 50, 1, 1, NOW),
            (-1, 1, 1, 1.0),
            (1, 1, 1, float("nan")),
        )
    ),
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_ledger_counts_from_zero_and_the_folder_is_searched(
    opened: Any, tmp_path: Path, content: bytes
) -> None:
    store = opened()
    assert write(store, "a")
    store.close()
    (tmp_path / "v1" / "usage").write_bytes(content)
    again = opened()
    assert write(again, "b")
    assert again.usage().used_bytes == 2 * PAGE


@pytest.mark.parametrize("what", ["nothing", "folder", "pipe", "link"])
def test_a_ledger_that_is_gone_is_made_anew_whatever_is_in_its_place(
    opened: Any, tmp_path: Path, what: str
) -> None:
    store = opened()
    assert write(store, "a")
    path = tmp_path / "v1" / "usage"
    path.unlink()
    make = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("b")}
    make.get(what, lambda: None)()
    assert Call(lambda: write(store, "b")).result(10)
    assert store.usage().used_bytes == used_in(tmp_path) == 2 * PAGE


def test_what_comes_during_a_scan_is_counted_whether_it_was_found_or_not(tmp_path: Path) -> None:
    ledger = counted(tmp_path / "usage")
    before = ledger.last
    assert ledger.reserve(10, 100)
    ledger.correct(before, used_bytes=50, num_pages=5)
    assert ledger.last.used_bytes == 60
    (tmp_path / "usage").unlink()  # what came is counted anew, from zero
    ledger.correct(ledger.last, used_bytes=50, num_pages=5)
    assert ledger.last.used_bytes == 50


def hold_the_lock(parent: peers.Parent, path: str) -> None:
    """In another process: take the ledger's lock, and wait."""
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        parent.send("held")
        parent.recv(None)


def test_a_process_that_is_stopped_inside_the_lock_holds_up_others_for_a_moment(
    opened: Any, tmp_path: Path, fork_server: ForkServer
) -> None:
    store = opened()
    assert write(store, "a")
    with fork_server.start(f"{__file__}:hold_the_lock", str(tmp_path / "v1" / "usage")) as child:
        assert child.recv() == "held"
        child.stop()
        begun = time.monotonic()
        assert Call(lambda: write(store, "b")).result(10)
        assert time.monotonic() - begun < 5
        assert read(store, "b") is not None


def test_what_others_count_while_a_slow_disk_removes_a_page_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_PATIENCE_S", 0.0)
    ledger, other = (Ledger(str(tmp_path / "usage")) for _ in range(2))
    ledger.correct(Totals(), used_bytes=100, num_pages=2)
    ledger.release(40, lambda: other.reserve(10, 1000))
    assert ledger.last.used_bytes == 70


# -- eviction --------------------------------------------------------------------------------------


def test_a_page_gets_the_room_of_more_pages_than_one_scan_proposes(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper_module, "_MAX_CANDIDATES", 2)
    store = opened(size=10 * PAGE)
    for number in range(10):
        assert write(store, number)
    assert write(store, "large", 9 * PAGE)
    assert used_in(tmp_path) == store.usage().used_bytes == 10 * PAGE


def test_a_writer_evicts_while_the_folder_is_searched_and_its_page_counts_once(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, all_pages = opened(size=10 * PAGE), PageFolder.all_pages
    for number in range(11):
        assert write(store, number)
    has_begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(folder: PageFolder) -> Any:
        has_begun.set()
        assert may_end.wait(20)
        yield from all_pages(folder)
        has_ended.set()

    monkeypatch.setattr(PageFolder, "all_pages", slowly)
    try:
        for number in range(7):
            assert Call(lambda name=f"more {number}": write(store, name)).result(10)
        assert has_begun.wait(20), "the folder is not searched before there is nothing left to evict"
        assert Call(lambda: write(store, "meanwhile")).result(10)
    finally:
        may_end.set()
    assert has_ended.wait(20)
    time.sleep(0.2)  # for what the thread would do after it
    assert used_in(tmp_path) == 10 * PAGE, "pages were evicted for the sake of a page that was counted twice"


def test_a_smaller_size_is_kept_to_when_the_folder_is_opened_again(opened: Any, tmp_path: Path) -> None:
    store = opened()
    for number in range(10):
        assert write(store, number)
    store.close()
    os.unlink(tmp_path / "v1" / "usage")
    smaller = opened(size=4 * PAGE)
    until(lambda: used_in(tmp_path) <= 4 * PAGE)
    until(lambda: smaller.usage().used_bytes == used_in(tmp_path))


def test_what_other_programs_write_and_delete_is_found_at_the_next_search(
    opened: Any, tmp_path: Path
) -> None:
    store = opened(size=10 * PAGE, rescan_s=0.1)
    for number in range(8):
        assert write(store, number)
    for number in range(4):
        page_path(tmp_path, key_of(number)).unlink()
    until(lambda: store.usage().num_pages == 4, what="that deleted pages are not counted any more")
    path = page_path(tmp_path, key_of("copied"))
    path.parent.mkdir(exist_ok=True)
    shutil.copy(page_path(tmp_path, key_of(5)), path)
    until(lambda: store.usage().num_pages == 5, what="that a page which another program copied is counted")


def test_a_search_that_takes_long_holds_up_no_writer(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(size=4 * PAGE)
    for number in range(5):
        assert write(store, number)
    searching, go_on = threading.Event(), threading.Event()

    def slowly(_: PageFolder) -> Iterator[Any]:
        searching.set()
        go_on.wait(20)
        yield from ()

    monkeypatch.setattr(PageFolder, "all_pages", slowly)
    search = Call(lambda: scan(store))
    assert searching.wait(10)
    assert Call(lambda: write(store, "a")).result(10)
    go_on.set()
    search.result(10)


def test_a_page_goes_and_is_counted_out_in_one_turn(tmp_path: Path) -> None:
    """Else a scan in between, which does not find it, would have it counted out twice."""
    path = tmp_path / "usage"
    ledger = Ledger(str(path))
    ledger.correct(Totals(), 100, 2)

    def remove() -> None:
        with open(path) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    ledger.release(40, remove)
    assert (ledger.last.used_bytes, ledger.last.num_pages) == (60, 1)

    def is_gone() -> None:
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        ledger.release(40, is_gone)
    with ledger.change() as totals:
        assert totals.used_bytes == 60


# -- several processes -----------------------------------------------------------------------------


def flood(parent: peers.Parent, path: str, size: int, who: int) -> int:
    """In another process: write, read and touch pages until told to end. Returns how many were kept."""
    store = open_store(path, size=size, touch_s=0, rescan_s=0.05, threads=1)
    parent.send("ready")
    kept = number = 0
    while not parent.poll():
        number += 1
        name = (who if number % 3 else 0, number)
        kept += write(store, name, 5000 + number % 20_000)
        page = read(store, name)
        assert page is None or page == b"".join(page_of(name, 5000 + number % 20_000)), name
        store.touch([key_of((who, number - 5))])
    store.close()
    return kept


def test_processes_that_evict_at_the_same_time_stay_within_the_budget_together(
    opened: Any, tmp_path: Path, fork_server: ForkServer
) -> None:
    size = 40 * PAGE
    with (
        fork_server.start(f"{__file__}:flood", str(tmp_path), size, 1) as one,
        fork_server.start(f"{__file__}:flood", str(tmp_path), size, 2) as other,
    ):
        for child in (one, other):
            assert child.recv() == "ready"
        used = []
        for number in range(60):
            time.sleep(0.001 * (number % 40))
            for child in (one, other):
                child.stop()
            used.append(used_in(tmp_path))
            for child in (one, other):
                child.cont()
        for child in (one, other):
            child.send("end")
        counts = [child.result() for child in (one, other)]
    assert min(counts) > 20, "a process found no room for its pages"
    assert size // 4 < max(used) <= size, f"{max(used)} bytes were used of {size}"
    store = opened(size=size)
    scan(store)
    assert store.usage().used_bytes == used_in(tmp_path)
    assert aside_in(tmp_path) == []


# -- killed at each step ---------------------------------------------------------------------------

STEPS = ("open", "flock", "writev", "link", "unlink")


def stop_at(parent: peers.Parent, path: str, step: str, when: str) -> None:
    """In another process: write a page, and stop just before or after one call of the system for it."""
    store = open_store(path)
    write(store, "before")

    def stop() -> None:
        parent.send("there")
        os.kill(os.getpid(), signal.SIGSTOP)

    owner = fcntl if step == "flock" else os
    call = getattr(owner, step)

    def stopping(*args: Any, **given: Any) -> Any:
        # the ledger's file is opened and locked, too: only the page is meant
        mine = step not in ("open", "flock") or (step == "open" and "/writing/" in str(args[0]))
        mine = mine or (step == "flock" and "/writing/" in os.readlink(f"/proc/self/fd/{args[0]}"))
        if mine and when == "before":
            stop()
        if step == "writev":
            call(args[0], [args[1][0][:60]])  # a part of it
            stop()
        done = call(*args, **given)
        if mine and when == "after":
            stop()
        return done

    setattr(owner, step, stopping)
    write(store, "page")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_writer_that_is_killed_at_a_step_leaves_a_whole_page_or_none(
    opened: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fork_server: ForkServer,
    step: str,
    when: str,
) -> None:
    store = opened()
    with fork_server.start(f"{__file__}:stop_at", str(tmp_path), step, when) as child:
        assert child.recv() == "there"
        if step not in ("open", "unlink") or (step, when) == ("unlink", "before"):
            monkeypatch.setattr(sweeper_module, "ASIDE_S", -1.0)
            scan(store)
            living = (step, when) != ("flock", "before")
            assert bool(aside_in(tmp_path)) is living, "the file of a writer that is stopped was removed"
            monkeypatch.undo()
        child.kill()
    page = read(store, "page")
    assert page in (None, b"".join(page_of("page")))
    there = (step, when) in (("link", "after"), ("unlink", "before"), ("unlink", "after"))
    assert (page is not None) is there
    monkeypatch.setattr(sweeper_module, "ASIDE_S", -1.0)
    scan(store)
    assert aside_in(tmp_path) == [], "the file of a dead writer is left"
    assert store.usage().used_bytes == used_in(tmp_path) == (1 + there) * PAGE
    assert write(store, "page")
    assert read(store, "page") == b"".join(page_of("page"))


def test_files_aside_are_left_alone_while_they_are_new(opened: Any, tmp_path: Path) -> None:
    store = opened()
    assert write(store, "a")
    aside = tmp_path / "v1" / "writing" / f"{'0' * 32}-10000"
    aside.write_bytes(b"part")
    scan(store)
    assert aside.exists()
    assert store.usage().used_bytes == 2 * PAGE, "what is being written is counted whole"
    then = time.time() - 2 * sweeper_module.ASIDE_S
    os.utime(aside, (then, then))
    scan(store)
    assert not aside.exists()
    assert store.usage().used_bytes == PAGE
