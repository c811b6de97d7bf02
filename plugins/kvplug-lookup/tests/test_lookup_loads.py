"""Loads, and the connections for them, where something goes wrong at a bad moment."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kvplug import ClosedError
from kvplug.engine import CacheGroup, KVCacheConfig, Parallelism, StalledError
from kvplug.net.wire.token_ids import pack_tokens
from kvplug.transport import Deadline, DeviceMark, GetJob, MissReason, PageBuffers, PageCopy, PageSeal
from kvplug.transport.store.store import Store
from kvplug_lookup.connector import peers
from kvplug_lookup.connector.groups import Groups
from kvplug_lookup.connector.load import Load
from kvplug_lookup.connector.plan import LoadPlan
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call, until
from lookup_engines import PROMPT, both, config, failures, pair, promised

pytestmark = pytest.mark.timeout(60)


class Asking:
    """A store that is being asked, until the test lets the answer come."""

    route = "the test"
    seal = PageSeal(checksums=True)

    def __init__(self) -> None:
        self.is_asked, self.goes_on = threading.Event(), threading.Event()
        self.job: Any = None
        self.cancelled = threading.Event()

    def submit_get(self, pages: Any, *, timeout: Any) -> GetJob:
        self.is_asked.set()
        assert self.goes_on.wait(20)
        self.job = GetJob(len(pages.keys), pages.series.format.num_layers, Deadline.after(None))
        self.job.on_cancel(self.cancelled.set)
        return self.job


def load_of(engine: FakeEngine) -> Load:
    """A load of two pages."""
    plan = LoadPlan(
        request_id="a",
        first_page=0,
        parent=bytes(32),
        packed_tokens=pack_tokens(range(32)),
        block_ids=((1, 2),),
        start=0,
        end=32,
        sources=((("x", 2),),),
        in_background=True,
    )
    group = CacheGroup(layer_names=engine.layer_names, layout=engine.layout)
    return Load(
        plan,
        Mock(config=Mock(timeout_s=20), options=Mock(stall_timeout_s=20), parallelism=Parallelism()),
        Groups(KVCacheConfig(groups=(group,), num_blocks=64)),
        engine.layout.page_views(tuple(engine.kv_caches.values())),
        16,
        progressed_at=lambda source: 0.0,
        after=DeviceMark(torch.device("cpu")),
    )


def test_a_load_that_fails_while_a_store_is_queried_ends_only_when_that_job_is_settled() -> None:
    """Its blocks would be another request's, and the job would still write into them."""
    with FakeEngine(config("producer"), listen="unix:") as engine:
        load, store = load_of(engine), Asking()
        asking = Call(lambda: load.begin(load.parts[0], store, engine.worker.first_tier.series))
        assert store.is_asked.wait(10)
        load.fail(ClosedError("the test wants it so"))
        assert not load.has_ended
        assert not Call(lambda: load.wait_settled(0.1)).result()
        store.goes_on.set()
        asking.result()
        assert store.cancelled.wait(10)
        assert not load.has_ended
        store.job.set(["cancelled"] * 2)
        assert load.has_ended


def test_a_store_that_raises_an_unexpected_error_fails_only_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        decode.worker.wait_until_ready(10)
        scheduled = promised(decode, request_of("a", PROMPT), 96)

        def refuse(*_: Any, **__: Any) -> Any:
            raise ValueError("a request for too many pages")

        monkeypatch.setattr(Store, "submit_get", refuse)
        assert len(decode.step([scheduled]).invalid_block_ids) == 6
        assert failures(decode, "load") == {"other": 1}


def test_waiting_for_a_peer_ends_at_the_timeout() -> None:
    with FakeEngine(config("consumer"), connect="unix:@kvplug-test-loads-no-engine") as decode:
        (peer,) = decode.worker.peers.values()
        first = Call(lambda: peer.connected(Deadline.after(10), retry=True))
        assert first.is_blocked()
        second = Call(lambda: peer.connected(Deadline.after(0.2), retry=True))
        second.raised(TimeoutError, 5)
        decode.worker.shutdown()
        assert first.outcome(5) is not None


def test_no_thread_is_left_of_a_silent_peer_that_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not answer, and connecting takes longer than the end of its client."""
    monkeypatch.setattr(peers, "_CLOSE_S", 0.1)
    before = set(threading.enumerate())
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0kvplug-test-loads-silent")
        silent.listen()
        with FakeEngine(config("consumer"), connect="unix:@kvplug-test-loads-silent") as decode:
            (peer,) = decode.worker.peers.values()
            given_up: list[Exception] = []
            for _ in range(2):
                peer.use(lambda *_: None, given_up.append, Deadline.after(1))
            peer.close()
            until(lambda: len(given_up) == 2)
            until(
                lambda: (
                    not [
                        each
                        for each in set(threading.enumerate()) - before
                        if each.name == "kvplug-lookup-peer"
                    ]
                )
            )


# -- copies that land late -------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GetJob, Any]]:
    """Gets of which nothing comes and that end when they are cancelled, with a copy under way. And their
    memory."""
    gets: list[tuple[GetJob, Any]] = []

    def submit_get(_: Store, pages: Any, **__: Any) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, Deadline.after(None))
        job.on_cancel(lambda: job.set([MissReason.CANCELLED] * job.count, settled=False))
        gets.append((job, pages.memory))
        return job

    monkeypatch.setattr(Store, "submit_get", submit_get)
    return gets


def test_blocks_are_computed_again_only_when_no_late_copy_can_overwrite_them(late: Any) -> None:
    with both({"stall_timeout_s": 0.1}) as engine:
        engine.prefill(request_of("stored", PROMPT))
        prompt, blocks, *rest = promised(engine, request_of("a", PROMPT), 96)
        assert engine.step([(prompt, blocks, *rest)]).invalid_block_ids == frozenset(blocks[:6])
        computing = Call(lambda: engine.step([(prompt, blocks, 0, 100)]))
        time.sleep(0.3)
        assert not computing.ended, "a copy may still land in the blocks"
        ((job, memory),) = late
        copy = PageCopy(memory)
        copy.use(0, PageBuffers.empty(memory.format, len(memory)).rows())
        copy.load(range(len(memory)))
        job.settle()
        assert not computing.result().invalid_block_ids
        assert engine.is_right(prompt.token_ids, blocks, 100)


def test_an_error_reports_blocks_that_stay_in_use(late: Any) -> None:
    """On one line, whatever id the client has chosen."""
    with both({"stall_timeout_s": 0.1}, timeout_s=0.5) as engine:
        engine.prefill(request_of("stored", PROMPT))
        prompt, blocks, *rest = promised(engine, request_of("a\n\x1b[2J" + "x" * 1000, PROMPT), 96)
        engine.step([(prompt, blocks, *rest)])
        message = r"blocks of request 'a\\n\\x1b\[2Jx{80,90} are still being written from host"
        with pytest.raises(StalledError, match=message):
            engine.step([(prompt, blocks, 0, 100)])
        late[0][0].settle()
