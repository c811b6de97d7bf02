"""The store "nixl" over a real S3 server and over a folder: what the kit does not know of."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplug import ConfigError
from kvplug.transport import MissReason, PutReason
from kvplug_nixl import probe as probing
from kvplug_nixl.store import folder as counting
from kvplug_testing import check_plugin, waits
from kvplug_testing.named_pages import own_store
from nixl_pages import PAGE, got, held, opened, put, request
from s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

needs_nixl = pytest.mark.skipif(not probing.probe().viable, reason=probing.probe().reason or "NIXL is here")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


def names_in(server: S3Server, prefix: str) -> list[str]:
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")
    return [each["Key"] for each in found.get("Contents", ())]


def files_in(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("pages/*/*"))


@needs_nixl
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("nixl") == ()


# -- S3 --------------------------------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (lambda body: body[:-1], [MissReason.CORRUPT, MissReason.FORMAT]),
        (lambda body: body[:1000], [MissReason.CORRUPT, MissReason.FORMAT]),
        (lambda body: body[:10], [MissReason.CORRUPT, MissReason.FORMAT]),
        (lambda _: b"", [MissReason.CORRUPT, MissReason.FORMAT]),
        (lambda body: body[:20_000] + b"!" + body[20_001:], [MissReason.CORRUPT]),
        (lambda body: b"kvplugN2" + body[8:], [MissReason.CORRUPT, MissReason.FORMAT]),
        (lambda _: b"another program's" * 100, [MissReason.CORRUPT, MissReason.FORMAT]),
    ],
    ids=["one byte", "most of it", "its head", "all of it", "a bit", "a later version", "a stranger's"],
)
def test_an_object_that_is_cut_off_or_altered_is_a_miss_and_makes_room(
    s3: S3Server, request: pytest.FixtureRequest, change: Any, reasons: list[MissReason]
) -> None:
    prefix = request.node.callspec.id.replace(" ", "-")
    store, client = opened(**s3.options, prefix=prefix), s3.client()
    assert put(store, "a", "b") == [None, None]
    name = sorted(names_in(s3, prefix))[0]
    body = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    client.put_object(Bucket=BUCKET, Key=name, Body=change(body))
    results = got(store, "a", "b")
    (wrong,) = [each for each in results if each is not None]
    assert wrong in reasons
    assert held(store, "a", "b").count("held") == 1
    assert put(store, "a", "b") == [None, None]
    assert got(store, "a", "b") == [None, None]
    store.close()


@needs_nixl
def test_what_is_removed_is_a_small_object_and_is_absent_for_every_process(s3: S3Server) -> None:
    one, other = (opened(**s3.options, prefix="removed") for _ in range(2))
    assert put(one, "a") == [None]
    assert list(other.submit_remove(request(other, "a", "b").keys).wait(10)) == [True, True]
    (name,) = names_in(s3, "removed")
    assert s3.client().head_object(Bucket=BUCKET, Key=name)["ContentLength"] < 100
    for store in (one, other):
        assert held(store, "a") == ["absent"]
        assert got(store, "a") == [MissReason.ABSENT]
    assert put(one, "a", fill=b"again") == [None]
    assert got(other, "a", fill=b"again") == [None]
    one.close()
    other.close()


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path)
    yield server
    server.kill()


@needs_nixl
def test_a_stopped_server_ends_requests_in_time_and_nothing_lands_late(own_s3: S3Server) -> None:
    store = opened(**own_s3.options, transfers=2)
    assert put(store, "a", "b", "c") == [None] * 3
    own_s3.process.send_signal(signal.SIGSTOP)
    wanted = request(store, "a", "b", "c", fill=b"?")
    began = time.monotonic()
    job = store.submit_get(wanted, timeout=0.7)
    assert list(job.wait(10)) == [MissReason.TIMEOUT] * 3
    assert time.monotonic() - began < 2
    assert job.wait_settled(1), "the memory is not the caller's again"
    own_s3.process.send_signal(signal.SIGCONT)
    waits.until(lambda: got(store, "a", "b", "c") == [None] * 3, 30, "pages of the server that goes on")
    assert bytes(wanted.memory.rows().buffer) == b"?" * (3 * PAGE), "bytes came after the end"  # type: ignore[union-attr]
    store.close()


@needs_nixl
def test_a_killed_server_is_noticed_at_once_and_a_new_one_is_used(
    own_s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(**own_s3.options)
    assert put(store, "a") == [None]
    own_s3.kill()
    began = time.monotonic()
    assert got(store, "a") == [MissReason.STORE_GONE]
    assert time.monotonic() - began < 5
    assert f"127.0.0.1:{own_s3.port} does not answer" in caplog.text
    own_s3.start()
    waits.until(lambda: put(store, "b") == [None], 30, "a page in the new server")
    assert got(store, "a", "b") == [MissReason.ABSENT, None]
    store.close()
    assert SECRET_KEY not in caplog.text + repr(store) + repr(own_store(store)) + repr(vars(own_store(store)))


@needs_nixl
def test_closing_while_a_page_is_on_its_way_stops_no_other_thread(own_s3: S3Server) -> None:
    store = opened(**own_s3.options)
    assert put(store, "a") == [None]
    own_s3.process.send_signal(signal.SIGSTOP)
    job = store.submit_get(request(store, "a"), timeout=30)
    agent = own_store(store)._agent
    waits.until(lambda: agent._users, 10, "a transfer under way")
    gaps, ends = [], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not ends.wait(0.01):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    store.abort()  # waits for it at most five seconds
    assert list(job.wait(1)) == [MissReason.CLOSED]
    own_s3.process.send_signal(signal.SIGCONT)
    waits.until(lambda: agent._agent is None, 15, "that NIXL's agent is gone")
    ends.set()
    ticking.join()
    assert max(gaps) < 1.5, "the interpreter's lock was held while a transfer ended"


@needs_nixl
def test_what_is_wrong_at_the_server_is_named(s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(**{**s3.options, "bucket": "no-such-bucket"})
    assert put(store, "a") == [PutReason.READ_ONLY]  # HEAD says 404 of a bucket as of an object
    assert got(store, "a") == [MissReason.ABSENT]
    store.close()
    assert caplog.text.count("takes no object for the bucket 'no-such-bucket'") == 1
    assert SECRET_KEY not in caplog.text and ACCESS_KEY not in caplog.text


# -- folders ---------------------------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize("length", [0, 1000, PAGE], ids=["all of it", "most of it", "its end"])
def test_a_file_that_is_cut_off_is_a_miss_and_makes_room(tmp_path: Path, length: int) -> None:
    store = opened(path=str(tmp_path))
    assert put(store, "a", "b") == [None, None]
    os.truncate(files_in(tmp_path)[0], length)
    results = got(store, "a", "b")
    assert sorted(each is None for each in results) == [False, True]
    assert {*results} & {MissReason.CORRUPT, MissReason.FORMAT}
    assert put(store, "a", "b") == [None, None]
    assert got(store, "a", "b") == [None, None]
    store.close()


@needs_nixl
def test_what_a_dead_writer_has_left_goes_when_room_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(path=str(tmp_path), size=4 * 45_056)
    assert put(store, "a") == [None]
    left = tmp_path / "nixl-v1" / "writing" / f"{'0' * 32}-100000"
    left.write_bytes(bytes(10))
    os.utime(left, (1, 1))
    monkeypatch.setattr(counting, "_ORPHAN_S", 5.0)
    assert put(store, *"bcdef") == [None] * 5
    assert not left.exists()
    usage = store.usage()
    found = files_in(tmp_path)
    assert usage.num_pages == len(found) and usage.num_evicted == 6 - len(found)
    assert usage.used_bytes == sum(-(-each.stat().st_size // 4096) * 4096 for each in found) <= 4 * 45_056
    store.close()


@needs_nixl
def test_while_another_process_is_stopped_that_counts_pages_are_read_and_none_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_PATIENCE_S", 0.2)
    store = opened(path=str(tmp_path))
    assert put(store, "a") == [None]
    with open(tmp_path / "nixl-v1" / "usage", "rb") as counted:
        fcntl.flock(counted, fcntl.LOCK_EX)
        assert put(store, "b") == [PutReason.NO_ROOM]
        assert got(store, "a") == [None]
    assert put(store, "b") == [None]
    assert len(list((tmp_path / "nixl-v1" / "writing").iterdir())) == 0
    store.close()


@needs_nixl
def test_foreign_things_in_the_folder_are_no_pages_and_are_replaced(tmp_path: Path) -> None:
    store = opened(path=str(tmp_path))
    assert put(store, *"abcd") == [None] * 4
    link, pipe, folder, _ = files_in(tmp_path)
    for path in (link, pipe, folder):
        path.unlink()
    outside = tmp_path / "outside"
    outside.write_text("not a page")
    os.utime(outside, (1, 1))
    link.symlink_to(outside)
    os.mkfifo(pipe)
    folder.mkdir()
    assert sorted(held(store, *"abcd")) == ["absent"] * 3 + ["held"]
    store.touch(request(store, *"abcd").keys)
    assert got(store, *"abcd").count(None) == 1
    assert outside.stat().st_mtime == 1, "a link was followed"
    assert put(store, *"abcd") == [None] * 4
    assert got(store, *"abcd") == [None] * 4
    store.close()


@needs_nixl
@pytest.mark.parametrize(
    "values",
    [(2**63 - 1, 1), (1 << 50, 1), (-1, 1)],
    ids=["the largest number", "more than the budget", "negative"],
)
def test_a_damaged_count_is_made_anew(tmp_path: Path, values: tuple[int, int]) -> None:
    store = opened(path=str(tmp_path), size=1 << 20)
    assert put(store, "a", "b") == [None] * 2
    (tmp_path / "nixl-v1" / "usage").write_bytes(
        counting._RECORD.pack(counting._MAGIC, *values, zlib.crc32(repr(values).encode()))
        if values[0] > 0
        else struct.pack("<8sqq", counting._MAGIC, *values)
    )
    assert put(store, "c") == [None]
    assert got(store, "a", "b", "c") == [None] * 3
    assert store.usage().num_pages == 3
    store.close()


@needs_nixl
@pytest.mark.parametrize("which", ["", "nixl-v1", "nixl-v1/pages"])
def test_a_folder_that_others_can_write_to_is_refused_by_name(tmp_path: Path, which: str) -> None:
    folder = tmp_path / "kv" / which
    folder.mkdir(parents=True)
    os.chmod(folder, 0o777)  # noqa: S103 - as a careless user does
    with pytest.raises(
        ConfigError, match=rf"options\.nixl\.path: the folder {folder} can be written to by other"
    ):
        opened(path=str(tmp_path / "kv"))


# -- options, NIXL itself --------------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give path for files in a folder, or bucket"),
        ({"path": "/tmp/a", "bucket": "b"}, "path and bucket were given"),
        ({"path": __file__}, "is not a folder"),
        ({"bucket": "b", "size": 1 << 30}, "lifecycle rule"),
        ({"bucket": "b", "access_key": "k"}, "secret_key_file: nothing was given"),
        ({"bucket": "b", "secret_key_file": "/nowhere"}, "access_key: nothing was given"),
        ({"bucket": "b", "access_key": "k", "secret_key_file": "/nowhere"}, "cannot be read"),
        ({"bucket": "b", "endpoint": "10.0.0.7:9000"}, "endpoint.*allowed is http"),
        ({"bucket": "b", "prefix": "a//b"}, "prefix"),
    ],
)
def test_wrong_options_are_named_before_anything_is_done(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        opened(**options)


QUIET = """
import logging, os, sys
from nixl_pages import opened, put, got
store = opened(path=sys.argv[1])
assert put(store, "a") == [None] and got(store, "a", "b") == [None, "absent"]
assert logging.raiseExceptions and "NIXL_LOG_LEVEL" not in os.environ
store.close()
"""


@needs_nixl
def test_nixl_is_quiet_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    environment.pop("NIXL_LOG_LEVEL", None)
    done = subprocess.run(
        [sys.executable, "-c", QUIET, str(tmp_path)], env=environment, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_where_nixl_is_missing_the_probe_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "MODULE", "no_such_module")
    found = probing.probe()
    assert not found.viable and "pip install" in (found.reason or "") and "nixl-cu12" in (found.reason or "")


@needs_nixl
def test_where_a_backend_is_missing_the_probe_names_it() -> None:
    assert probing.probe("POSIX").viable
    assert "NO_SUCH" in (probing.probe("NO_SUCH").reason or "")
