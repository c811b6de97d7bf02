"""The connector "lookup" is told to forget: nothing computed before is loaded by who comes after."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from kvplug import Config
from kvplug.engine import Request, RequestEnd, WorkerOutput
from kvplug.transport import Removed, Snapshot, Stored, event_to_plain, pack_tokens
from kvplug_lookup.connector.load import Load
from kvplug_lookup.connector.replica import Replica
from kvplug_testing.engine import FakeEngine, request_of

pytestmark = pytest.mark.timeout(60)

BASE: dict[str, Any] = {"connector": "lookup", "connect_timeout_s": 20, "timeout_s": 10}
ASYNC = {"options": {"lookup": {"async_load": True}}}
BLOCK = 16
KV_OF_100_TOKENS = 2 * 3 * 100 * 2 * 8 * 4


def config(role: str, **more: Any) -> Config:
    return Config.from_dict({**BASE, "role": role, **more})


@contextlib.contextmanager
def pair(**producer: Any) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with (
        FakeEngine(config("producer", **producer), listen="unix:", seed=1) as prefill,
        FakeEngine(config("consumer"), connect=prefill.worker.contact, seed=2) as decode,
    ):
        yield prefill, decode


@contextlib.contextmanager
def both(name: str, **more: Any) -> Iterator[FakeEngine]:
    """An engine that saves for itself and loads what it saved."""
    with FakeEngine(config("both", host=f"unix:@kvplug-test-reset-{name}", **more), num_blocks=512) as engine:
        yield engine


def admit(engine: FakeEngine, prompt: Request) -> tuple[int, ...]:
    """A request comes in that computes all of its tokens. Returns its blocks."""
    blocks = engine.allocate(len(prompt.token_ids))
    engine.scheduler.on_new_request(prompt)
    engine.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
    return blocks


def num_stored(engine: FakeEngine) -> int:
    engine.worker._saver.settle()
    return len(engine.worker._store)


def saves(engine: FakeEngine) -> tuple[int, dict[str, int]]:
    """How many prompts were stored since the last call, and how many were not, by reason."""
    stats = engine.figures() or {"ops": {}, "failures": {}}
    return stats["ops"].get("save", {"count": 0})["count"], stats["failures"].get("save", {})


def assert_loads(engine: FakeEngine, prompt: Request, count: int) -> None:
    """So many tokens are promised, and loaded as this engine would compute them."""
    blocks, loaded, report = engine.load(prompt)
    assert (loaded, report.invalid_block_ids) == (count, frozenset())
    assert engine.is_right(prompt.token_ids, blocks, len(prompt.token_ids))


# -- the producer --------------------------------------------------------------------------------


def test_what_a_producer_stored_before_it_was_reset_is_promised_to_nobody() -> None:
    with pair() as (prefill, decode):
        for name in "ab":
            prefill.prefill(request_of(name, range(100)))
        assert_loads(decode, request_of("before", range(100)), 96)
        assert prefill.scheduler.reset_cache() is True
        prefill.weights = decode.weights = 1
        prefill.step([])
        assert decode.matched(request_of("after", range(100))) == (0, False)
        assert num_stored(prefill) == 0
        prefill.prefill(request_of("again", range(100)))
        assert_loads(decode, request_of("again", range(100)), 96)


def test_an_idle_engine_is_asked_for_a_step_until_its_workers_have_been_told() -> None:
    with pair() as (prefill, _):
        assert not prefill.scheduler.has_pending_push_work()
        prefill.scheduler.reset_cache()
        prefill.scheduler.reset_cache()
        assert prefill.scheduler.has_pending_push_work()
        prefill.plan([])
        assert not prefill.scheduler.has_pending_push_work()


@pytest.mark.parametrize("starts_over", [False, True])
def test_a_prompt_of_which_a_part_was_computed_before_is_stored_only_if_it_starts_over(
    starts_over: bool,
) -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", range(100))
        blocks = admit(prefill, prompt)
        prefill.step([(prompt, blocks, 0, 40)])
        prefill.scheduler.reset_cache()
        prefill.weights = decode.weights = 1
        start = 0 if starts_over else 40
        prefill.step([(prompt, blocks, start, 30)])
        prefill.step([(prompt, blocks, start + 30, 100 - start - 30)])
        assert num_stored(prefill) == starts_over
        assert prefill.worker._saver.bytes_unsaved == 0
        if starts_over:
            assert_loads(decode, request_of("b", range(100)), 96)


def test_a_request_that_only_waited_is_stored_if_all_of_it_is_computed_afterwards() -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", range(100))
        blocks = admit(prefill, prompt)
        prefill.scheduler.reset_cache()
        prefill.step([(prompt, blocks, 0, 100)])
        assert_loads(decode, request_of("b", range(100)), 96)


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_steps_that_were_planned_before_store_nothing_that_lasts(num_ahead: int) -> None:
    with pair() as (prefill, decode):
        prompts = [request_of(f"p{n}", range(1000 * n, 1000 * n + 64)) for n in range(num_ahead)]
        planned = [prefill.plan([(prompt, admit(prefill, prompt), 0, 64)]) for prompt in prompts]
        prefill.scheduler.reset_cache()
        fresh = request_of("fresh", range(7000, 7064))
        planned.append(prefill.plan([(fresh, admit(prefill, fresh), 0, 64)]))
        for number, step in enumerate(planned):
            prefill.weights = float(number == num_ahead)
            prefill.scheduler.update_connector_output(prefill.execute(step))
        decode.weights = prefill.weights
        for prompt in prompts:
            assert decode.matched(request_of(f"{prompt.request_id}-there", prompt.token_ids)) == (0, False)
        assert num_stored(prefill) == 1
        assert_loads(decode, request_of("fresh-there", fresh.token_ids), 48)


class Gate:
    """Holds up what goes through it until it is opened."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(20)
        return self._function(*args, **kwargs)


@pytest.mark.parametrize("place", ["_store_one", "insert"])
def test_what_is_being_stored_or_waits_for_its_turn_is_forgotten_too(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saving thread has one in hand: it has still to look, or has looked and stores it all the same."""
    with pair() as (prefill, decode):
        store, saver = prefill.worker._store, prefill.worker._saver
        owner = store if place == "insert" else saver
        gate = Gate(getattr(owner, place))
        monkeypatch.setattr(owner, place, gate)
        for n in range(3):
            prefill.prefill(request_of(f"p{n}", range(1000 * n, 1000 * n + 64)))
        assert gate.reached.wait(5)
        events: list[Any] = []
        store.subscribe(events.append)
        prefill.scheduler.reset_cache()
        prefill.step([])
        assert saver.bytes_unsaved == 2 * 3 * 64 * 2 * 8 * 4, "the others' room is free at once"
        gate.opened.set()
        assert num_stored(prefill) == 0
        assert saver.bytes_unsaved == 0
        # Only what was past the last look is seen for a moment.
        assert [type(event) for event in events[1:]] == ([Stored, Removed] if place == "insert" else [])
        assert saves(prefill) == (0, {})
        prefill.prefill(request_of("again", range(64)))
        assert_loads(decode, request_of("b", range(64)), 48)


def test_a_save_that_waits_for_room_ends_and_is_no_failure() -> None:
    options = {"simple": {"evict": "never"}, "lookup": {"save_timeout_s": 3600}}
    with pair(buffer_size=int(1.2 * KV_OF_100_TOKENS), options=options) as (prefill, decode):
        prefill.prefill(request_of("first", range(100)))
        assert num_stored(prefill) == 1
        assert saves(prefill) == (1, {})
        waiting = threading.Event()
        wait = prefill.worker._store._lending._room.wait
        prefill.worker._store._lending._room.wait = lambda timeout: (waiting.set(), wait(timeout))
        prefill.prefill(request_of("second", range(1000, 1100)))
        assert waiting.wait(5)
        prefill.scheduler.reset_cache()
        prefill.step([])
        assert num_stored(prefill) == 0
        assert saves(prefill) == (0, {})
        prefill.prefill(request_of("again", range(2000, 2100)))
        assert_loads(decode, request_of("b", range(2000, 2100)), 96)


# -- the role both -------------------------------------------------------------------------------


def test_from_the_call_on_nothing_old_is_promised_whatever_the_replica_still_holds() -> None:
    with both("promises") as engine:
        prompt = request_of("a", range(100))
        engine.prefill(prompt)
        waiting = request_of("waiting", range(100))
        assert engine.matched(waiting) == (96, False)
        assert engine.scheduler.reset_cache() is True
        assert engine.scheduler.get_num_new_matched_tokens(waiting, 0) == (0, False)
        assert engine.matched(request_of("new", range(100))) == (0, False)
        engine.weights = 1
        engine.step([])
        assert engine.matched(request_of("newer", range(100))) == (0, False)
        engine.prefill(request_of("again", range(100)))
        assert_loads(engine, request_of("newest", range(100)), 96)


class FakeReplica:
    """Holds 96 tokens of anything until it is dropped."""

    link = None
    was_connected = True

    def __init__(self) -> None:
        self.num_drops = 0

    def fence(self) -> None:
        return None

    def has_passed(self, fence: Any) -> bool:
        return True

    def match(self, token_ids: Any, extra: bytes) -> int:
        return 0 if self.num_drops else 96

    def drop(self) -> None:
        self.num_drops += 1

    def close(self) -> None:
        return None


def test_nothing_is_promised_until_every_worker_has_said_that_it_forgot() -> None:
    said = {"failed_loads": [], "spoilt_saves": [], "timed_out": False, "refused": False}

    def reset(step: int, *workers: bool) -> WorkerOutput:
        return WorkerOutput(worker_metadata=tuple({**said, "step": step, "reset": did} for did in workers))

    with both("workers") as engine:
        scheduler = engine.scheduler
        for replica in scheduler._replicas:
            replica.close()
        replica = FakeReplica()
        scheduler._replicas = (replica, replica)
        scheduler._context = attrs.evolve(
            scheduler._context, parallelism=attrs.evolve(scheduler._context.parallelism, num_workers=2)
        )

        def promised() -> int | None:
            found: int | None = scheduler.get_num_new_matched_tokens(request_of("a", range(100)), 0)[0]
            return found

        assert promised() == 96
        scheduler.reset_cache()
        engine.plan([])  # step 1
        assert promised() == 0
        scheduler.update_connector_output(reset(1, True, False))
        assert (promised(), replica.num_drops) == (0, 0)
        scheduler.reset_cache()  # once more, before the first is through
        scheduler.update_connector_output(reset(1, True))
        assert promised() == 0
        replica.num_drops = 0
        engine.plan([])  # step 2
        scheduler.update_connector_output(reset(1, True, True))
        assert (promised(), replica.num_drops) == (0, 0)
        scheduler.update_connector_output(reset(2, True, True))
        assert replica.num_drops == 2
        replica.num_drops = 0
        assert promised() == 96


class FakeLink:
    """A link whose other end is the test."""

    def __init__(self) -> None:
        self.channel = self
        self.sent: list[Any] = []
        self._answers: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def send(self, value: Any, timeout: Any = None) -> None:
        self.sent.append(value)

    def answer(self, value: Any) -> None:
        with self._changed:
            self._answers.append(value)
            self._changed.notify_all()

    def recv(self, timeout: Any = None) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._answers)
            return self._answers.popleft() if self._answers else {"event": "none"}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def test_a_replica_that_was_dropped_waits_for_the_answer_to_a_ping_sent_since(eventually: Any) -> None:
    link: Any = FakeLink()
    replica = Replica(lambda _: link, rank=0, fence_timeout_s=0.0)
    tokens = tuple(range(16))
    try:
        link.answer(event_to_plain(Snapshot(epoch="e", seq=1, count=1)))
        link.answer(event_to_plain(Stored(epoch="e", seq=1, entry_id=1, packed_tokens=pack_tokens(tokens))))
        eventually(lambda: replica.match(tokens, b"") == 16)
        assert replica.was_connected
        replica.doubt()  # its ping is on its way, and says nothing of what comes now
        replica.drop()
        assert [message["ping"] for message in link.sent] == [1]
        link.answer({"pong": 1})
        eventually(lambda: len(link.sent) == 2)
        assert replica.match(tokens, b"") == 0
        assert replica.has_passed(replica.fence()), "even where a request waits no longer"
        assert replica.match(tokens, b"") == 0
        link.answer({"pong": link.sent[1]["ping"]})
        eventually(lambda: replica.match(tokens, b"") == 16)
    finally:
        replica.close()


def test_a_load_that_was_planned_before_and_begins_after_finds_nothing_and_is_computed() -> None:
    with both("planned") as engine:
        engine.prefill(request_of("stored", range(100)))
        prompt = request_of("a", range(100))
        found, _ = engine.matched(prompt)
        assert found == 96
        blocks = engine.allocate(100)
        engine.scheduler.update_state_after_alloc(prompt, (blocks,), found)
        engine.scheduler.reset_cache()
        engine.weights = 1
        report = engine.step([(prompt, blocks, 96, 4)])
        assert report.invalid_block_ids == frozenset(blocks[:6])
        assert num_stored(engine) == 0
        engine.step([(prompt, blocks, 0, 100)])
        assert_loads(engine, request_of("b", range(100)), 96)


def test_a_load_under_way_goes_on_for_its_request_and_is_not_saved_again(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    gate = Gate(Load.layer)
    monkeypatch.setattr(Load, "layer", lambda *args: gate(*args))
    with both("under-way", **ASYNC) as engine:
        engine.prefill(request_of("stored", range(100)))
        prompt = request_of("a", range(150))
        found, is_async = engine.matched(prompt)
        assert (found, is_async) == (96, True)
        blocks = engine.allocate(150)
        engine.scheduler.update_state_after_alloc(prompt, (blocks,), found)
        assert not engine.step([]).finished_recving
        assert gate.reached.wait(5)
        engine.scheduler.reset_cache()
        reports = [engine.step([])]
        gate.opened.set()
        while not reports[-1].finished_recving:
            reports.append(engine.step([]))
        assert not any(report.invalid_block_ids for report in reports)
        engine.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
        assert engine.is_right(prompt.token_ids, blocks, 96)
        engine.weights = 1
        engine.step([(prompt, blocks, 96, 54)])
        engine.scheduler.request_finished(prompt, (blocks,), RequestEnd.FINISHED)
        assert num_stored(engine) == 0
        eventually(lambda: engine.worker._store.bytes_used == 0)  # the reader's lease ends after the load


# -- the consumer --------------------------------------------------------------------------------


def test_a_consumer_cannot_forget_for_its_producer_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with FakeEngine(config("producer"), listen="unix:") as prefill:
        decode = FakeEngine(config("consumer"), connect=prefill.worker.contact)
        with decode:
            decode.scheduler.wait_until_ready(10)
            assert decode.scheduler.reset_cache() is False
            assert "reset that engine" in caplog.text
            assert not decode.scheduler.has_pending_push_work()
            prefill.scheduler.shutdown()
            prefill.worker.shutdown()
            assert decode.scheduler.reset_cache() is False, "it may come back, with all that it holds"


def test_a_consumer_without_a_producer_has_nothing_to_forget() -> None:
    with FakeEngine(config("consumer"), connect="unix:@kvplug-test-reset-nobody") as decode:
        assert decode.scheduler.reset_cache() is True
