"""What the connector "lookup" does while a device still works off what was queued for it.

Without a device: a queue in the test stands for its stream. Only the last test needs a real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvplug_lookup.connector import device, worker
from kvplug_testing.comparison import assert_filled
from kvplug_testing.engine import CallOrder, FakeEngine, request_of
from kvplug_testing.waits import until
from lookup_engines import PROMPT, pair

pytestmark = pytest.mark.timeout(60)

LATE = CallOrder(loads_after_forward=True)


class Stream:
    """Work that is queued, and done where the test says so."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], Any]] = []
        self._num_done = 0
        self._changed = threading.Condition()
        self.waited_for = threading.Event()

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

    def has_done(self, count: int) -> bool:
        return self._num_done >= count

    def wait(self, count: int) -> None:
        self.waited_for.set()
        with self._changed:
            assert self._changed.wait_for(lambda: self.has_done(count), 20), "the queue stands still"


class Mark:
    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    @property
    def is_passed(self) -> bool:
        return self._stream.has_done(self._count)

    def wait(self) -> None:
        self._stream.wait(self._count)


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
    with pair(consumer={"lookup": {"async_load": True, "stall_timeout_s": 20}}) as (prefill, decode):
        prompt = request_of("a", PROMPT)
        prefill.prefill(prompt)
        assert decode.matched(prompt) == (96, True)
        blocks = decode.allocate(100)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), 96)
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
    until(lambda: decode.step([]).finished_recving)
    assert decode.is_right(prompt.token_ids, blocks, 96)


def test_a_load_that_waits_for_the_device_can_be_given_up_and_then_writes_nothing(loading: Any) -> None:
    decode, _, blocks, stream = loading
    report = decode.execute(decode.plan([], preempted=frozenset({"a"})))
    assert report.invalid_block_ids == frozenset(blocks[:6])
    stream.run()
    until(lambda: not any(t.name == "kvplug-lookup-load" for t in threading.enumerate()))
    for cache in decode.kv_caches.values():
        assert_filled(7, cache[:, list(blocks)])


def test_on_a_cpu_nothing_is_waited_for() -> None:
    mark = device.Mark(torch.zeros(1))
    assert mark.is_passed
    mark.wait()


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
