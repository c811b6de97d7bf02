"""What the connector "lookup" does while a device still works off what was queued for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.cuda import _sleep as spin

from kvplug.assembly import stores
from kvplug.engine import RequestEnd
from kvplug.transport import DeviceMark
from kvplug.transport.store.staging import transfers
from kvplug.transport.store.staging.memory import PinnedMemory
from kvplug_testing import peers, simulated
from kvplug_testing.engine import CallOrder, FakeEngine, request_of
from kvplug_testing.waits import Call, until
from lookup_engines import (
    PAGE_BYTES,
    PROMPT,
    an_address,
    assert_loads,
    config,
    failures,
    num_held,
    pair,
    until_promised,
)

pytestmark = pytest.mark.timeout(60)

LATE = CallOrder(loads_after_forward=True)


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Whether copies of pages to the device were queued."""
    event, queue = threading.Event(), transfers.queue_scatter

    def queue_and_note(*given: Any) -> None:
        queue(*given)
        event.set()

    monkeypatch.setattr(transfers, "queue_scatter", queue_and_note)
    return event


@pytest.fixture
def loading() -> Iterator[tuple[FakeEngine, Any, Any, ExitStack]]:
    """An engine that has begun to load in the background into blocks that queued work still fills, and the
    stall of its device, which does nothing until that is closed."""
    options = {"lookup": {"async_load": True, "stall_timeout_s": 20}}
    with pair(consumer=options, device="simulated") as (prefill, decode), ExitStack() as stall:
        prompt = request_of("a", PROMPT)
        prefill.prefill(prompt)
        assert decode.matched(prompt) == (96, True)
        blocks = decode.allocate(100)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), 96)
        stall.enter_context(simulated.stalled())
        decode.cache.free(blocks)
        report = Call(lambda: decode.step([], order=LATE)).result()  # though the device does nothing
        assert not report.finished_recving
        yield decode, prompt, blocks, stall


def test_a_load_waits_for_earlier_work_on_its_blocks_and_the_engine_does_not_wait(loading: Any) -> None:
    decode, prompt, blocks, stall = loading
    stall.close()
    until(lambda: decode.step([]).finished_recving)
    assert decode.is_right(prompt.token_ids, blocks, 96)


def test_blocks_of_an_abandoned_load_are_not_written_once_the_engine_may_use_them(
    queued: threading.Event, loading: Any
) -> None:
    decode, _, blocks, stall = loading
    until(queued.is_set, what="pages on their way to the device")
    assert decode.worker.progressed_at("peer")
    planned = decode.plan([], preempted=frozenset({"a"}))
    giving_up = Call(lambda: decode.execute(planned))
    time.sleep(0.1)
    assert not giving_up.ended, "the device may still write them"
    stall.close()
    assert giving_up.result().invalid_block_ids == frozenset(blocks[:6])
    decode.cache.free(blocks)
    assert not decode.cache.written(blocks)


# -- more pages than there is staging memory for ---------------------------------------------------


@pytest.fixture
def little_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for four pages, in pieces of one."""
    monkeypatch.setattr(stores, "PinnedMemory", lambda _: PinnedMemory(4 * PAGE_BYTES))


@contextmanager
def saving(**given: Any) -> Iterator[tuple[FakeEngine, Any, Any, ExitStack]]:
    """An engine, a request whose pages a step saves, its blocks, and the stall of the device, which has read
    none of them."""
    given = {"stores": ["host"], "staging_size": 1 << 20, "device": "simulated", **given}
    keys = config("both", host=an_address("both"), **given)
    with FakeEngine(keys, num_blocks=1100, device="simulated") as engine, ExitStack() as stall:
        prompt = request_of("a", PROMPT)
        blocks = engine.admit(prompt)
        planned = engine.plan([(prompt, blocks, 0, 100)])
        stall.enter_context(simulated.stalled())
        engine.hear(engine.execute(planned, compute=False))
        yield engine, prompt, blocks, stall


def test_blocks_of_a_request_that_has_ended_are_kept_until_all_its_pages_are_read(
    little_staging: None,
) -> None:
    with saving() as (engine, prompt, blocks, stall):
        assert engine.finish(prompt, blocks) == (True, None)
        other = request_of("b", range(5000, 5010))
        theirs = engine.admit(other)
        for _ in range(3):
            report = Call(lambda: engine.step([(other, theirs, 0, 10)], compute=False)).result()
            assert not report.finished_sending
        assert engine.scheduler.has_pending_push_work()
        stall.close()
        named: list[str] = []
        until(lambda: named.extend(engine.step([]).finished_sending) or named, what="the end of the reads")
        engine.step([])
        assert named == ["a"] and not engine.scheduler.has_pending_push_work()
        assert num_held(engine) == 6


@pytest.mark.parametrize("how", ["preempted", "aborted"])
def test_waiting_pages_are_given_up_before_their_blocks_are_reused_and_the_engine_does_not_wait(
    how: str, little_staging: None
) -> None:
    with saving() as (engine, prompt, blocks, stall):
        if how == "aborted":
            assert engine.finish(prompt, blocks, RequestEnd.ABORTED)[0]
        planned = engine.plan([], preempted=frozenset({"a"} if how == "preempted" else ()))
        report = Call(lambda: engine.execute(planned)).result()
        assert not report.finished_sending, "the device has not read them yet"
        if how == "preempted":
            engine.cache.free(blocks)  # their next use is queued after the copies
        stall.close()
        if how == "aborted":
            until(
                lambda: engine.execute(engine.plan([])).finished_sending == {"a"}, what="the end of the reads"
            )
        until(lambda: num_held(engine) == 4, what="the pages that were being read")
        assert failures(engine, "save") == {"cancelled": 2}
        if how == "preempted":  # the request resumes before the report arrives
            engine.step([(prompt, blocks, 0, 100)])
            until(lambda: num_held(engine) == 6, what="the other pages")


@pytest.mark.parametrize("how", ["preempted", "aborted", "reset"])
def test_a_device_that_is_busy_longer_than_the_save_timeout_does_not_end_the_engine(
    how: str, little_staging: None
) -> None:
    with saving(lookup={"save_timeout_s": 0.2}) as (engine, prompt, blocks, stall):
        if how == "aborted":
            engine.finish(prompt, blocks, RequestEnd.ABORTED)
        if how == "reset":
            engine.scheduler.reset_cache()
        planned = engine.plan([], preempted=frozenset({"a"} if how == "preempted" else ()))
        giving_up = Call(lambda: engine.execute(planned))
        time.sleep(0.6)
        stall.close()
        giving_up.result()


# -- a GPU ------------------------------------------------------------------------------------------


def exchange(parent: peers.Parent | None, device: str, num_pages: int) -> None:
    """Pages of 30 layers, which are released some layers at a time, by several threads."""
    on = {"producer": {"device": device}, "consumer": {"device": device}}
    with pair(**on, device=device, num_blocks=num_pages + 80, num_layers=30) as (prefill, decode):
        prompt = range(16 * num_pages + 8)
        prefill.free_blocks.extend(prefill.prefill(request_of("stored", prompt)))
        until_promised(decode, prompt, 16 * num_pages)
        for number in range(3):
            assert_loads(decode, request_of(f"a{number}", prompt), 16 * num_pages)


def test_many_layers_of_many_pages_are_loaded_as_they_were_computed() -> None:
    exchange(None, "simulated", 96)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: loads into one are not tested")
def test_many_layers_of_many_pages_are_loaded_on_a_gpu_as_they_were_computed() -> None:
    """In a process without the simulated device, beside which torch cannot pin memory for a GPU."""
    with peers.start(exchange, "cuda:0", 512, timeout_s=60.0) as child:
        child.result(60.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: marks in a real stream are not tested")
def test_a_mark_in_a_gpus_stream_comes_after_the_work_that_this_thread_queued() -> None:
    found: list[float] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(1, device="cuda")
        spin(100_000_000)
        tensor.fill_(1)
        mark = DeviceMark(tensor.device)

    def look() -> None:  # on another stream, as every thread
        mark.wait()
        found.append(tensor.item())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(30)
    assert found == [1.0]
