"""What the connector "lookup" does while a device still works off what was queued for it.

Without a device: a queue in the test stands for its stream. Only the last test needs a real one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvplug import Config
from kvplug_lookup.connector import device, save, worker
from kvplug_testing.comparison import assert_filled
from kvplug_testing.engine import CallOrder, FakeEngine, request_of

pytestmark = pytest.mark.timeout(60)

BASE: dict[str, Any] = {"connector": "lookup", "connect_timeout_s": 20, "timeout_s": 30}
ASYNC = {"options": {"lookup": {"async_load": True}}}
LATE = CallOrder(loads_after_forward=True)


class Stream:
    """Work that is queued, and done where the test says so."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], Any]] = []
        self._num_done = 0
        self._changed = threading.Condition()
        self.waited_for = threading.Event()
        self.is_stuck = False

    def put(self, work: Callable[[], Any]) -> None:
        with self._changed:
            self._queue.append(work)

    def run(self) -> None:
        """Do all of it."""
        with self._changed:
            for work in self._queue[self._num_done :]:
                work()
            self._num_done = len(self._queue)
            self._changed.notify_all()

    def mark(self, tensor: torch.Tensor) -> Mark:
        return Mark(self, len(self._queue))

    def wait(self, count: int) -> None:
        self.waited_for.set()
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_done >= count, 20):
                self.is_stuck = True
                raise TimeoutError("nobody works off what was queued")


class Mark:
    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def wait(self) -> None:
        self._stream.wait(self._count)


@contextlib.contextmanager
def pair(**consumer: Any) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    ours, theirs = ({**BASE, "role": "producer"}, {**BASE, "role": "consumer", **consumer})
    with (
        FakeEngine(Config.from_dict(ours), listen="unix:", seed=1) as prefill,
        FakeEngine(Config.from_dict(theirs), connect=prefill.worker.contact, seed=2) as decode,
    ):
        yield prefill, decode


def copies(engine: FakeEngine) -> list[torch.Tensor]:
    return [cache.clone() for cache in engine.kv_caches.values()]


def fill(engine: FakeEngine, blocks: tuple[int, ...]) -> None:
    for cache in engine.kv_caches.values():
        cache[:, list(blocks)] = 7


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeEngine, Any, Any, Stream]]:
    """An engine that has begun to load in the background into blocks that queued work still fills."""
    stream = Stream()
    monkeypatch.setattr(worker, "Mark", stream.mark)
    with pair(**ASYNC) as (prefill, decode):
        prompt = request_of("a", range(100))
        prefill.prefill(prompt)
        found, _ = decode.matched(prompt)
        assert found == 96
        blocks = decode.allocate(100)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
        stream.put(lambda: fill(decode, blocks))
        before = copies(decode)
        report = decode.step([], order=LATE)  # returns, though nothing that is queued is done
        assert not report.finished_recving
        assert stream.waited_for.wait(10)
        assert all(map(torch.equal, before, copies(decode)))
        yield decode, prompt, blocks, stream
        stream.run()


def test_a_load_waits_for_what_its_blocks_are_still_needed_for_and_the_engine_does_not(loading: Any) -> None:
    decode, prompt, blocks, stream = loading
    stream.run()
    named: frozenset[str] = frozenset()
    while not named:
        named = decode.step([]).finished_recving
    assert decode.is_right(prompt.token_ids, blocks, 96)


def test_a_load_that_waits_for_the_device_can_be_given_up_and_then_writes_nothing(
    loading: Any,
) -> None:
    decode, _, blocks, stream = loading
    planned = decode.plan([], preempted=frozenset({"a"}))
    report = decode.execute(planned)
    assert not stream.is_stuck, "the engine waited for the device"
    assert report.invalid_block_ids == frozenset(blocks[:6])
    stream.run()
    decode.worker.shutdown()  # the loader's thread has ended
    for cache in decode.kv_caches.values():
        assert_filled(7, cache[:, list(blocks)])


def test_loads_wait_for_what_was_queued_when_they_began_and_not_for_what_came_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream()

    def mark_and_go_on(tensor: torch.Tensor) -> Mark:
        mark = stream.mark(tensor)
        stream.put(lambda: None)  # which nobody ever does
        return mark

    monkeypatch.setattr(worker, "Mark", mark_and_go_on)
    with pair() as (prefill, decode):
        prompt = request_of("a", range(100))
        prefill.prefill(prompt)
        blocks, loaded, report = decode.load(prompt)
        assert (loaded, report.invalid_block_ids) == (96, frozenset())
        assert decode.is_right(prompt.token_ids, blocks, 100)


def test_what_is_stored_is_what_was_queued_to_be_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(save, "Mark", stream.mark)
    calls: list[str] = []
    with pair() as (prefill, decode):
        saver, store = prefill.worker._saver, prefill.worker._store
        gather, insert = save.gather, store.insert
        monkeypatch.setattr(save, "gather", lambda *args, **kw: stream.put(lambda: gather(*args, **kw)))
        monkeypatch.setattr(
            store, "insert", lambda *args, **kw: (insert(*args, **kw), calls.append("insert"))
        )
        monkeypatch.setattr(save, "wait_for_device", lambda tensor: calls.append("wait"))
        prompt = request_of("a", range(100))
        prefill.prefill(prompt, chunk=40)  # returns, though nothing was gathered
        assert stream.waited_for.wait(10)
        assert len(store) == 0
        stream.run()
        saver.settle()
        assert calls == ["insert", "wait"]  # before the memory that the store copies is another's
        blocks, loaded, report = decode.load(prompt)
        assert (loaded, report.invalid_block_ids) == (96, frozenset())
        assert decode.is_right(prompt.token_ids, blocks, 100)


def test_on_a_cpu_nothing_is_waited_for() -> None:
    device.Mark(torch.zeros(1)).wait()
    device.wait_for_device(torch.zeros(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: marks in a real stream are not tested")
def test_a_mark_in_a_gpus_stream_is_behind_what_this_thread_queued() -> None:
    found: list[float] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(1, device="cuda")
        torch.cuda._sleep(100_000_000)
        tensor.fill_(1)
        mark = device.Mark(tensor)

    def look() -> None:  # on another stream, as every thread
        mark.wait()
        found.append(tensor.item())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(30)
    assert found == [1.0]
