"""The store "nixl" over a real S3 server and over a folder: what the kit does not know of."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import stopped

import nixl_pages
from kvplug import ConfigError
from kvplug.transport import MissReason, PutReason
from kvplug_lab.named_pages import own_store
from kvplug_nixl import probe as probing
from kvplug_nixl.store.agent import Agent
from kvplug_testing import check_plugin, waits
from nixl_pages import PAGE, got, held, put, request
from s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

pytestmark = pytest.mark.skipif(not probing.probe().viable, reason=probing.probe().reason or "NIXL is here")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Makes stores, which are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(nixl_pages.opened(**options))


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """NIXL is loaded, which takes seconds of processor time: no deadline of a test counts them."""
    with nixl_pages.opened(path=str(tmp_path_factory.mktemp("first"))) as store:
        store.submit_lookup(request(store, "a").keys, timeout=100).wait(100)


def names_in(server: S3Server, prefix: str) -> list[str]:
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")
    return [each["Key"] for each in found.get("Contents", ())]


def files_in(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("pages/*/*"))


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("nixl") == ()


# -- S3 --------------------------------------------------------------------------------------------


ALTERED: dict[str, Callable[[bytes], bytes]] = {
    "lacks its last byte": lambda body: body[:-1],
    "lacks all but its head": lambda body: body[:10],
    "is empty": lambda _: b"",
    "has another bit": lambda body: body[:20_000] + b"!" + body[20_001:],
    "is of a later version": lambda body: b"kvplugN2" + body[8:],
    "is a stranger's": lambda _: b"another program's" * 100,
}


def test_an_object_that_is_cut_off_or_altered_is_a_miss_and_makes_room(opened: Any, s3: S3Server) -> None:
    store, client = opened(**s3.options, prefix="altered"), s3.client()
    assert put(store, *ALTERED, "whole") == [None] * 7
    for name, key in zip(ALTERED, request(store, *ALTERED).keys, strict=True):
        (found,) = (each for each in names_in(s3, "altered") if each.endswith(key.hex()))
        body = client.get_object(Bucket=BUCKET, Key=found)["Body"].read()
        client.put_object(Bucket=BUCKET, Key=found, Body=ALTERED[name](body))
    results = dict(zip(ALTERED, got(store, *ALTERED), strict=True))
    assert results["has another bit"] is MissReason.CORRUPT
    # Memory that is used again may still have the byte that is cut off: then the page is right.
    assert results.pop("lacks its last byte") in (None, MissReason.CORRUPT, MissReason.FORMAT)
    assert {*results.values()} <= {MissReason.CORRUPT, MissReason.FORMAT}, results
    assert held(store, *results, "whole") == ["absent"] * 5 + ["held"]
    assert put(store, *ALTERED) == [None] * 6
    assert got(store, *ALTERED, "whole") == [None] * 7


def test_what_is_removed_is_a_small_object_and_is_absent_for_every_process(opened: Any, s3: S3Server) -> None:
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


def test_a_stopped_server_ends_requests_in_time_and_nothing_lands_late(opened: Any, s3: S3Server) -> None:
    store = opened(**s3.options, transfers=2, prefix="stopped")
    assert put(store, "a", "b", "c") == [None] * 3
    wanted = request(store, "a", "b", "c", fill=b"?")
    with stopped(s3.process):
        began = time.monotonic()
        job = store.submit_get(wanted, timeout=0.7)
        assert list(job.wait(10)) == [MissReason.TIMEOUT] * 3
        assert time.monotonic() - began < 2
        assert job.wait_settled(1), "the memory is not the caller's again"
    waits.until(lambda: got(store, "a", "b", "c") == [None] * 3, 30, "pages of the server that goes on")
    assert bytes(wanted.memory.rows().buffer) == b"?" * (3 * PAGE), "bytes came after the end"  # type: ignore[union-attr]


def test_a_killed_server_is_noticed_at_once_and_a_new_one_is_used(
    opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(S3Server(tmp_path)) as server, opened(**server.options) as store:
        assert put(store, "a") == [None]
        server.kill()
        began = time.monotonic()
        assert got(store, "a") == [MissReason.STORE_GONE]
        assert time.monotonic() - began < 5
        assert f"{server.address} does not answer" in caplog.text
        server.start()
        waits.until(lambda: put(store, "b") == [None], 30, "a page in the new server")
        assert got(store, "a", "b") == [MissReason.ABSENT, None]
        shown = caplog.text + repr(store) + repr(own_store(store)) + repr(vars(own_store(store)))
    assert SECRET_KEY not in shown


def test_closing_while_a_page_is_on_its_way_stops_no_other_thread(opened: Any, s3: S3Server) -> None:
    store = opened(**s3.options, prefix="closing")
    assert put(store, "a") == [None]
    agent = own_store(store)._agent
    gaps, ends = [], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not ends.wait(0.01):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    with stopped(s3.process):
        job = store.submit_get(request(store, "a"), timeout=30)
        waits.until(lambda: agent._users, 10, "a transfer under way")
        ticking.start()
        store.abort()  # waits for it at most five seconds
        assert list(job.wait(1)) == [MissReason.CLOSED]
    waits.until(lambda: agent._agent is None, 15, "that NIXL's agent is gone")
    ends.set()
    ticking.join()
    assert max(gaps) < 1.5, "the interpreter's lock was held while a transfer ended"


def test_what_is_wrong_at_the_server_is_named(
    opened: Any, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(**{**s3.options, "bucket": "no-such-bucket"})
    assert put(store, "a") == [PutReason.READ_ONLY]  # HEAD says 404 of a bucket as of an object
    assert got(store, "a") == [MissReason.ABSENT]
    store.close()
    assert caplog.text.count("refuses an object for the bucket 'no-such-bucket'") == 1
    assert SECRET_KEY not in caplog.text and ACCESS_KEY not in caplog.text


# -- folders ---------------------------------------------------------------------------------------


def test_the_pages_of_a_folder_keep_its_budget(opened: Any, tmp_path: Path) -> None:
    store = opened(
        path=str(tmp_path), size=4 * 45_056, transfers=1
    )  # a search counts concurrent writes twice
    assert put(store, *"abcdef") == [None] * 6
    usage, found = store.usage(), files_in(tmp_path)
    assert usage.num_pages == len(found) and usage.num_evicted == 6 - len(found)
    assert usage.used_bytes == sum(-(-each.stat().st_size // 4096) * 4096 for each in found) <= 4 * 45_056
    assert list((tmp_path / "nixl-v1" / "writing").iterdir()) == []


@pytest.mark.parametrize("what", ["READ", "WRITE"])
def test_a_transfer_that_nixl_refuses_is_of_its_page(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = opened(path=str(tmp_path))
    assert put(store, "a") == [None]
    move = Agent.move

    def refused(agent: Any, operation: Any, moves: Any) -> list[bool]:
        return [False] * len(moves) if operation == what else move(agent, operation, moves)

    monkeypatch.setattr(Agent, "move", refused)
    assert put(store, "b") == [PutReason.OTHER if what == "WRITE" else None]
    assert got(store, "a") == [MissReason.UNREADABLE if what == "READ" else None]
    monkeypatch.undo()
    assert put(store, "a", "b") == got(store, "a", "b") == [None] * 2


# -- options, NIXL itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give path for files in a folder, or bucket"),
        ({"path": "/tmp/a", "bucket": "b"}, "path and bucket were given"),
        ({"path": __file__}, "is not a folder"),
        ({"bucket": "b", "size": 1 << 30}, "lifecycle rule"),
        ({"bucket": "b", "access_key": "k"}, "secret_key_file: nothing was given"),
        ({"bucket": "b", "access_key": "k", "secret_key_file": "/nowhere"}, "cannot be read"),
    ],
)
def test_wrong_options_are_named_before_anything_is_done(
    opened: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        opened(**options)


def test_where_nixl_is_missing_the_probe_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "MODULE", "no_such_module")
    found = probing.probe()
    assert not found.viable and "pip install" in (found.reason or "") and "nixl-cu12" in (found.reason or "")


def test_where_a_backend_is_missing_the_probe_names_it() -> None:
    assert probing.probe("POSIX").viable
    assert "NO_SUCH" in (probing.probe("NO_SUCH").reason or "")
