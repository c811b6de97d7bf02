"""The store "fs" on disks that are full, read-only or failing. Real ones, in a namespace of their own."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from folders import aside_in, key_of, open_store, page_of, page_path, read, used_in, write
from kvplug.transport import MissReason, PageSeal, Presence, PutReason
from kvplug.transport.store.executor import ExecutedStore
from kvplug.transport.store.folder.files import cost_of
from kvplug_testing import peers
from kvplug_testing.contract.store.calls import ended, got, kept, put
from kvplug_testing.contract.store.pages import batch, sized_format
from kvplug_testing.waits import until

PAGE = cost_of(10_000)
SEAL = PageSeal()


def mounted(target: Any, path: Path, *args: Any) -> peers.Peer:
    """Run the function in a process that may mount file systems, which other processes do not see."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    tried = subprocess.run(
        [*command, "mount", "-t", "tmpfs", "none", str(path)], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.strip()}")
    return peers.start(target, str(path), *args, python=command[0], flags=[*command[1:], sys.executable])


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def fill_a_small_disk(parent: peers.Parent, path: str) -> Any:
    """In another process: a disk of 1 MiB below a budget of 1 GiB."""
    mount("-t", "tmpfs", "-o", "size=1m", "none", path)
    store = open_store(path, size=1 << 30)
    kept = [write(store, number) for number in range(300)]
    there = [number for number in range(300) if read(store, number) is not None]
    whole = all(read(store, number) == b"".join(page_of(number)) for number in there)
    used = used_in(path)
    large = store.write(key_of("large"), page_of("large", 3 << 20))
    aside = aside_in(path)
    store.close()
    return {
        "kept": kept.count(True),
        "there": there,
        "whole": whole,
        "aside": aside,
        "used": used,
        "large": large,
    }


def test_a_full_disk_is_a_used_budget(tmp_path: Path) -> None:
    with mounted(fill_a_small_disk, tmp_path) as child:
        said = child.result(60)
    assert said["kept"] == 300
    assert said["whole"]
    assert len(said["there"]) > 40
    assert said["there"][-1] == 299, "the page that was written last is not there"
    assert said["aside"] == []
    assert said["used"] <= 1 << 20
    assert said["large"] is False, "a page that the whole disk cannot take was kept"


def use_a_read_only_disk(parent: peers.Parent, path: str) -> Any:
    """In another process: a disk on which nothing can be written."""
    mount("-t", "tmpfs", "none", path)
    store = ExecutedStore(open_store(path), name="fs", seal=SEAL)
    pages = batch(3, seal=SEAL, namespace=b"")
    kept(store, pages)
    damaged = page_path(path, pages.keys[1])
    os.truncate(damaged, os.path.getsize(damaged) - 1)
    store.close()
    mount("-o", "remount,ro", path)
    store = ExecutedStore(open_store(path, touch_s=0), name="fs", seal=SEAL)
    results = [
        ended(store.submit_get(pages.empty())),
        put(store, batch(2, seal=SEAL, namespace=b"new")),
        ended(store.submit_remove(pages.keys)),
        ended(store.submit_get(pages.empty())),
        ended(store.submit_lookup(pages.keys)),
    ]
    store.touch(pages.keys)
    got(store, pages[:1])
    store.close()
    return [
        [None if each is None else each if each is False else str(each) for each in one] for one in results
    ]


def test_from_a_read_only_disk_pages_are_read_and_puts_are_refused(tmp_path: Path) -> None:
    with mounted(use_a_read_only_disk, tmp_path) as child:
        read_, written, removed, again, looked = child.result(60)
    assert read_ == again == [None, str(MissReason.CORRUPT), None]
    assert written == [str(PutReason.READ_ONLY)] * 2
    assert removed == [False] * 3
    assert looked == [str(Presence.HELD), str(Presence.ABSENT), str(Presence.HELD)]


def lose_a_disk(parent: peers.Parent, path: str) -> Any:
    """In another process: the disk below the folder is taken away, and comes back."""
    mount("-t", "tmpfs", "none", path)
    store = ExecutedStore(open_store(path), name="fs", seal=SEAL)
    pages = batch(3, seal=SEAL, namespace=b"")
    kept(store, pages)
    subprocess.run(["umount", "--lazy", path], check=True)
    gone = [
        {*map(str, ended(store.submit_get(pages.empty())))},
        {*map(str, ended(store.submit_lookup(pages.keys)))},
        {*map(str, put(store, batch(3, seal=SEAL, namespace=b"more")))},
    ]
    below = os.listdir(path)
    mount("-t", "tmpfs", "none", path)
    more = batch(3, seal=SEAL, namespace=b"again")
    until(lambda: put(store, more) == [None] * 3)
    got(store, more)
    store.close()
    return [sorted(each) for each in gone], below


def test_a_disk_that_is_taken_away_is_a_store_that_is_gone_and_nothing_is_made_below(tmp_path: Path) -> None:
    (tmp_path / "v1" / "pages").mkdir(0o700, parents=True)  # an earlier run has had its pages below
    with mounted(lose_a_disk, tmp_path) as child:
        gone, below = child.result(60)
    assert gone == [[str(MissReason.STORE_GONE)], [str(Presence.ABSENT)], [str(PutReason.STORE_GONE)]]
    assert below == ["v1"] and os.listdir(tmp_path / "v1") == ["pages"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "writev", "link"])
def test_whichever_call_finds_the_disk_full_pages_are_evicted_and_it_is_tried_once_more(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, call: str
) -> None:
    store = opened()
    for number in range(4):
        assert write(store, number)
        os.utime(page_path(tmp_path, key_of(number)), (1000 + number, 1000 + number))
    usual, failures = getattr(os, call), [error]

    def once(*args: Any, **given: Any) -> Any:
        if failures and (call != "open" or "/writing/" in str(args[0])):
            raise OSError(failures.pop(), "full")
        return usual(*args, **given)

    monkeypatch.setattr(os, call, once)
    assert write(store, "new")
    monkeypatch.undo()
    assert not failures
    assert store.has([key_of(each) for each in (0, 1, 2, 3, "new")]) == [False, False, True, True, True]
    assert store.usage().used_bytes == used_in(tmp_path) == 3 * PAGE


def test_a_limit_on_the_length_of_files_evicts_nothing(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = batch(3, seal=SEAL)
    kept(whole, pages[:2])

    def too_long(*_: Any) -> int:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "writev", too_long)
    assert put(whole, pages) == [None, None, PutReason.NO_ROOM]
    got(whole, pages[:2])


def test_pages_whose_blocks_cannot_be_read_are_missed_and_replaced(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = batch(2, sized_format(1000), seal=SEAL)
    kept(whole, pages)
    bad = page_path(tmp_path, pages.keys[0]).stat()
    preadv = os.preadv

    def fail(fd: int, *args: Any) -> int:
        status = os.fstat(fd)
        if (status.st_ino, status.st_mtime_ns) == (bad.st_ino, bad.st_mtime_ns):
            raise OSError(errno.EIO, "input/output error")
        return preadv(fd, *args)

    monkeypatch.setattr(os, "preadv", fail)
    assert ended(whole.submit_get(pages.empty())) == [MissReason.UNREADABLE, None]
    assert ended(whole.submit_lookup(pages.keys)) == [Presence.ABSENT, Presence.HELD]
    kept(whole, pages)
    got(whole, pages)
