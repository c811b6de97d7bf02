"""The files of the store "fs": how a page comes to have its name, and what becomes of damaged ones."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from folders import aside_in, folder_at, key_of, open_store, page_of, page_path, read, scan, used_in, write
from kvplug import ConfigError
from kvplug.transport import MissReason, PageSeal, PutReason
from kvplug.transport.store.folder import files as folder_module
from kvplug_lab.named_pages import own_store
from kvplug_testing.contract.store.calls import ended, got, held, kept, put
from kvplug_testing.contract.store.pages import batch, kv_format, sized_format
from kvplug_testing.waits import Call

SEAL = PageSeal()


@pytest.fixture
def store(opened: Any, tmp_path: Path) -> Any:
    return opened(tmp_path / "kv")


def test_only_this_user_can_read_the_files_and_a_name_is_the_key(store: Any, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert write(store, "a")
    finally:
        os.umask(before)
    found = list((tmp_path / "kv" / "v1").rglob("*"))
    assert len(found) == 5  # the folders pages, pages/xx and writing, the page, the file usage
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert page_path(tmp_path / "kv", key_of("a")).read_bytes() == b"".join(page_of("a"))


@pytest.mark.parametrize("error", [0, *sorted(folder_module.NO_LINKS)], ids=errno.errorcode.get)
def test_of_many_writers_of_one_key_the_first_wins_with_links_and_without(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    if error:
        monkeypatch.setattr(os, "link", no_links)
    folder, store = folder_at(tmp_path), opened()
    for number in range(8):
        start = threading.Barrier(4)

        def put(writer: int, number: int = number, start: threading.Barrier = start) -> bool:
            page = page_of((writer, number))
            start.wait(20)
            with folder.new_file(10_000) as file:
                store.write_file(file.fd, page)
                return folder.publish(file, key_of(number))

        calls = [Call(lambda writer=writer: put(writer)) for writer in range(4)]
        won = [call.result() for call in calls]
        assert won.count(True) == 1
        page = page_path(tmp_path, key_of(number)).read_bytes()
        assert page == b"".join(page_of((won.index(True), number)))
    assert aside_in(tmp_path) == []


def test_a_page_is_written_whole_when_the_system_takes_it_in_pieces(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0][:777]]))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:333]], at))
    assert write(store, "a")
    assert read(store, "a") == b"".join(page_of("a"))
    parts = [bytearray(60), bytearray(0), bytearray(10_000 - 60)]
    assert store.read(key_of("a"), [memoryview(part) for part in parts]) == 10_000
    assert b"".join(parts) == b"".join(page_of("a"))


def test_a_file_that_is_shorter_than_it_was_is_told_by_its_length(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(store, "a")
    fstat = os.fstat

    def before_it_was_cut(fd: int) -> os.stat_result:
        status = fstat(fd)
        if status.st_size == 10_000:
            os.truncate(page_path(tmp_path / "kv", key_of("a")), 5_000)
        return status

    monkeypatch.setattr(os, "fstat", before_it_was_cut)
    assert store.read(key_of("a"), [memoryview(bytearray(10_000))]) == 5_000


def test_keys_are_those_of_pages_whatever_else_lies_there(whole: Any, tmp_path: Path) -> None:
    pages, other = batch(3, seal=SEAL), batch(2, kv_format(3), seal=SEAL)
    long = batch(1, sized_format(10), seal=SEAL)
    long = type(long)(
        series=long.series, keys=long.keys, identities=(b"x" * 100_000,), contents=long.contents
    )
    for each in (pages, other, long):
        kept(whole, each)
    folder = page_path(tmp_path, pages.keys[0]).parent
    (folder / "notes.txt").write_text("not a page")
    (folder / ("z" * 62)).write_text("nor this")
    (folder / ("0" * 62)).write_text("a page without a header")
    (folder.parent / "file").write_text("no folder")
    assert set(whole.keys(pages.series)) == set(pages.keys)
    assert set(whole.keys(other.series)) == set(other.keys)
    assert whole.keys(long.series) == list(long.keys), "its header is longer than what is read first"
    got(whole, long)


def test_a_path_of_something_else_is_refused_and_of_a_later_folder_is_not(
    opened: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"options\.fs\.path: .*/file is not a folder"):
        open_store(tmp_path / "file")
    store = opened(tmp_path / "in" / "a" / "new" / "place")
    assert write(store, "a")


def _directory(path: Path) -> None:
    path.mkdir()


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "content").write_text("of somebody")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a directory": _directory,
    "a directory with content": _full_directory,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to a file": lambda path: path.symlink_to(__file__),
    "a pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_thing_under_a_pages_name_is_no_page_and_is_replaced_where_it_can(
    whole: Any, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages = batch(20, seal=SEAL)
    kept(whole, pages)
    path = page_path(tmp_path, pages.keys[3])
    path.unlink()
    FOREIGN[what](path)
    others = [index != 3 for index in range(20)]
    assert held(whole, pages) == others
    results = ended(whole.submit_get(pages.empty()))
    assert [each is None for each in results] == others and results[3] is not MissReason.STORE_GONE
    assert held(whole, pages) == others
    assert set(whole.keys(pages.series)) == {*pages.keys[:3], *pages.keys[4:]}
    whole.touch(pages.keys)
    scan(own_store(whole))
    if "content" in what:
        for _ in range(3):
            assert put(whole, pages)[3] is PutReason.UNREADABLE
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len([line for line in lines if "a folder that is not empty" in line]) == 1, "once, and why"
    else:
        kept(whole, pages)
        got(whole, pages)


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_thing_in_place_of_a_folder_of_pages_hides_no_others(
    whole: Any, tmp_path: Path, what: str
) -> None:
    pages = batch(20, seal=SEAL)
    kept(whole, pages)
    folder = page_path(tmp_path, pages.keys[3]).parent
    others = [key[:1] != pages.keys[3][:1] for key in pages.keys]
    shutil.rmtree(folder)
    FOREIGN[what](folder)
    assert held(whole, pages) == others
    assert [each is None for each in ended(whole.submit_get(pages.empty()))] == others
    kept(whole, pages)
    got(whole, pages)
    assert not folder.is_symlink()


def test_no_link_is_followed_out_of_the_folder(whole: Any, tmp_path: Path) -> None:
    pages = batch(2, seal=SEAL)
    kept(whole, pages)
    one, other = (page_path(tmp_path, key) for key in pages.keys)
    outside = tmp_path / "outside"
    outside.mkdir()
    one.rename(outside / "page")
    one.symlink_to(outside / "page")
    other.parent.rename(outside / "folder")
    other.parent.symlink_to(outside / "folder")
    for path in (outside / "page", outside / "folder" / other.name):
        os.utime(path, (1, 1))
    whole.touch(pages.keys)
    assert None not in ended(whole.submit_get(pages.empty()))
    ended(whole.submit_remove(pages.keys))
    kept(whole, pages)
    for path in (outside / "page", outside / "folder" / other.name):
        assert path.stat().st_mtime == 1, "a link was followed"
    assert len(list((outside / "folder").iterdir())) == 1


@pytest.mark.parametrize("which", ["", "v1", "v1/pages", "v1/writing", "v1/pages/ab"])
@pytest.mark.parametrize("how", ["of another user", "writable by others"])
def test_a_folder_that_others_can_write_to_is_refused_by_name(tmp_path: Path, which: str, how: str) -> None:
    (tmp_path / "kv" / "v1" / "pages" / "ab").mkdir(parents=True)
    (tmp_path / "kv" / "v1" / "writing").mkdir()
    folder = tmp_path / "kv" / which
    if how == "of another user":
        if os.geteuid():
            pytest.skip("only root can make folders of another user")
        os.chown(folder, 65534, 65534)
    else:
        os.chmod(folder, 0o777)  # noqa: S103 - as a careless user does
    with pytest.raises(
        ConfigError, match=rf"options\.fs\.path: the folder {folder} .*(name another|chmod 700)"
    ):
        open_store(tmp_path / "kv")


def test_folders_that_exist_are_made_readable_by_this_user_alone(tmp_path: Path) -> None:
    for folder in (tmp_path / "v1", tmp_path / "v1" / "pages", tmp_path / "v1" / "pages" / "ab"):
        folder.mkdir(0o755)
    open_store(tmp_path).close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "v1").rglob("*") if path.is_dir()} == {
        0o700
    }


def test_a_folder_that_vanishes_is_empty_and_is_made_again(store: Any, tmp_path: Path) -> None:
    assert write(store, "a")
    os.rename(tmp_path / "kv", tmp_path / "gone")
    assert store.has([key_of("a")]) == [False]
    assert read(store, "a") is None
    store.touch([key_of("a")])
    store.remove([key_of("a")])
    assert write(store, "b")
    assert read(store, "b") == b"".join(page_of("b"))
    assert store.usage().num_pages == 1
    assert used_in(tmp_path / "kv") == store.usage().used_bytes


def test_sync_waits_for_the_page_and_for_its_name(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    for sync in (False, True):
        store = opened(tmp_path / str(sync), sync=sync)
        assert write(store, "a")
    assert len(synced) == 2
    assert "/writing/" in synced[0]
    assert synced[1].endswith("/pages/" + key_of("a").hex()[:2])


def test_a_read_is_recorded_as_a_use_now_and_then(opened: Any, tmp_path: Path) -> None:
    store = opened(tmp_path, touch_s=1000)
    assert write(store, "a")
    path = page_path(tmp_path, key_of("a"))
    for age, recorded in ((500, False), (1500, True)):
        then = os.stat(path).st_mtime - age
        os.utime(path, (then, then))
        read(store, "a")
        assert (os.stat(path).st_mtime != then) is recorded
    os.utime(path, (0, 0))
    store.touch([key_of("a"), key_of("absent")])
    assert os.stat(path).st_mtime > 1
