"""The connector "lookup" where things go wrong: nothing hangs, leaks, or is wrong and looks right."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvplug import (
    DEFAULT_TIMEOUT,
    ClosedError,
    Config,
    EntryHeader,
    EventLog,
    IntegrityError,
    KVLayout,
    LayoutError,
    PeerGoneError,
    Pipe,
    RequestEnd,
    Stored,
    TimeoutError,
    TransferStats,
    TransportError,
    WireError,
    event_to_plain,
    pack_tokens,
)
from kvplug.testing.engine import EngineDouble, request_of
from kvplug_lookup.connector import serve
from kvplug_lookup.connector.device import Mark
from kvplug_lookup.connector.load import Load, Loader
from kvplug_lookup.connector.plan import LoadPlan
from kvplug_lookup.connector.replica import Replica

pytestmark = pytest.mark.timeout(60)

BASE: dict[str, Any] = {"connector": "lookup", "connect_timeout_s": 20, "timeout_s": 10}
KV_OF_100_TOKENS = 2 * 3 * 100 * 2 * 8 * 4


def config(role: str, **more: Any) -> Config:
    return Config.from_dict({**BASE, "role": role, **more})


@contextlib.contextmanager
def pair(
    *, producer: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None, **build: Any
) -> Iterator[tuple[EngineDouble, EngineDouble]]:
    """Engines that know each other; ``producer`` and ``consumer`` are more of their configs."""
    with (
        EngineDouble(config("producer", **producer or {}), listen="unix:", seed=1, **build) as prefill,
        EngineDouble(
            config("consumer", **consumer or {}), connect=prefill.worker.contact, seed=2, **build
        ) as decode,
    ):
        yield prefill, decode


def tokens(count: int, first: int = 0) -> range:
    return range(first, first + count)


def promised(decode: EngineDouble, prompt: Any, expected: int) -> tuple[Any, Any, int, int]:
    """A request to schedule, with the load it was promised."""
    found, _ = decode.matched(prompt)
    assert found == expected
    blocks = decode.allocate(len(prompt.token_ids))
    decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
    return prompt, blocks, found, len(prompt.token_ids) - found


ASYNC = {"options": {"lookup": {"async_load": True}}}


# -- wrong KV ------------------------------------------------------------------------------------


def test_what_was_computed_beside_a_failed_load_in_shared_blocks_is_not_saved() -> None:
    options = {"lookup": {"max_unsaved": 1 << 30}}
    small = {"buffer_size": int(1.2 * KV_OF_100_TOKENS), "options": options}
    with EngineDouble(config("both", host="unix:@kvplug-test-shared", **small)) as engine:
        engine.prefill(request_of("stored", tokens(100)))
        first = promised(engine, request_of("first", tokens(100)), 96)
        other = torch.zeros(3, 100, 2, 8)
        engine.worker._store.insert(tokens(100, 5000), None, other, other, None)  # the promise is void
        # Its engine has a prefix cache: the first 96 tokens are the blocks that the other one loads.
        sharing = request_of("sharing", [*tokens(96), 7, 7, 7, 7])
        engine.scheduler.on_new_request(sharing)
        blocks = (*first[1][:6], *engine.allocate(4))
        engine.scheduler.update_state_after_alloc(sharing, (blocks,), 0)
        report = engine.step([first, (sharing, blocks, 96, 4)])
        assert report.invalid_block_ids == frozenset(blocks[:6])
        assert engine.matched(request_of("asking", sharing.token_ids))[0] == 0
        # The engine computes it again, and what is right is saved.
        engine.step([(sharing, blocks, 0, 100)])
        again, loaded, _ = engine.load(request_of("again", sharing.token_ids))
        assert loaded == 96
        assert engine.is_right(sharing.token_ids, again, 100)


def test_a_prompt_whose_engine_went_back_is_gathered_again_from_there() -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", tokens(100))
        blocks = prefill.allocate(100)
        prefill.scheduler.on_new_request(prompt)
        prefill.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
        prefill.compute(prompt.token_ids, blocks, 0, 16)
        prefill.step([(prompt, blocks, 0, 64)], compute=False)  # from token 16 on it is not its KV
        prefill.step([(prompt, blocks, 16, 84)])
        there, loaded, _ = decode.load(request_of("b", tokens(100)))
        assert loaded == 96
        assert decode.is_right(prompt.token_ids, there, 100)


@pytest.fixture
def load() -> Load:
    layout = KVLayout("KBTHD", {"K": 2, "B": 8, "T": 16, "H": 1, "D": 4})
    plan = LoadPlan(
        request_id="a",
        token_ids=tuple(tokens(32)),
        extra=b"",
        block_ids=(1, 2),
        start=0,
        in_background=False,
    )
    return made(plan, layout, (torch.zeros(layout.shape),))


def made(*arguments: Any, checksum: str | None = None) -> Load:
    free = Mark(torch.zeros(1))
    return Load(*arguments, free=free, checksum=lambda: checksum, stats=TransferStats())


def header(token_ids: Any, roi: Any = None, **metadata: Any) -> EntryHeader:
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    mask = torch.ones(len(ids), dtype=torch.bool) if roi is None else torch.tensor(roi)
    return EntryHeader(entry_id=1, tokens=ids, roi=mask, num_layers=1, metadata=metadata)


@pytest.mark.parametrize(
    "wrong",
    [
        header(tokens(31)),
        header([*tokens(31), 99]),
        header([99, *tokens(32)], [False] + [True] * 32),
        header(tokens(33), [True] * 31 + [False, True]),
    ],
)
def test_an_entry_of_other_tokens_than_those_promised_is_refused(load: Load, wrong: EntryHeader) -> None:
    with pytest.raises(IntegrityError, match="tokens"):
        load.begin(wrong)


def test_a_layer_of_fewer_tokens_than_promised_is_refused(load: Load) -> None:
    load.begin(header(tokens(40)))
    with pytest.raises(IntegrityError, match="31 tokens"):
        load.layer(0, torch.zeros(31, 1, 4), torch.zeros(31, 1, 4))
    with pytest.raises(IntegrityError, match="31 tokens"):
        load.layer(0, torch.zeros(40, 1, 4), torch.zeros(31, 1, 4))


def test_an_entry_whose_hashes_are_missing_or_no_hashes_is_refused() -> None:
    layout = KVLayout("KBTHD", {"K": 2, "B": 8, "T": 16, "H": 1, "D": 4})
    plan = LoadPlan(
        request_id="a", token_ids=tuple(tokens(16)), extra=b"", block_ids=(1,), start=0, in_background=False
    )
    for layers in (None, [], [1], "x"):
        load = made(plan, layout, (torch.zeros(layout.shape),), checksum="xxh3_64")
        with pytest.raises(IntegrityError, match="hash"):
            load.begin(header(tokens(16), checksum="xxh3_64", layers=layers))


def test_a_cache_that_was_allocated_in_inference_mode_is_loaded_into() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        with torch.inference_mode():
            decode.kv_caches.update({name: kv.clone() for name, kv in decode.kv_caches.items()})
            decode.worker.register_kv_caches(decode.kv_caches)
            blocks, loaded, report = decode.load(request_of("a", tokens(100)))
            assert loaded == 96 and not report.invalid_block_ids
            assert decode.is_right(tuple(tokens(100)), blocks, 100)


def test_a_load_before_the_cache_is_known_is_refused() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        scheduled = promised(decode, request_of("a", tokens(100)), 96)
        decode.worker._caches = ()
        with pytest.raises(LayoutError, match="register_kv_caches"):
            decode.step([scheduled])


def test_a_layer_without_a_cache_is_named() -> None:
    with EngineDouble(config("producer"), listen="unix:") as prefill:
        missing = dict(prefill.kv_caches)
        del missing["layers.1"]
        with pytest.raises(LayoutError, match=r"layers\.1"):
            prefill.worker.register_kv_caches(missing)


# -- requests that end ---------------------------------------------------------------------------


def test_an_abort_before_the_step_that_would_load_keeps_no_blocks() -> None:
    with pair(consumer=ASYNC) as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        prompt, blocks, *_ = promised(decode, request_of("a", tokens(100)), 96)
        keeps, _ = decode.scheduler.request_finished(prompt, (blocks,), RequestEnd.ABORTED)
        assert not keeps  # nobody would ever name it
        for _ in range(3):
            report = decode.step([])
            assert not report.finished_recving and not report.invalid_block_ids


def test_an_id_that_is_used_again_at_once_is_a_new_request() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        prefill.prefill(request_of("stored", tokens(100, first=1000)))
        first = promised(decode, request_of("a", tokens(100)), 96)
        decode.scheduler.request_finished(first[0], (first[1],), RequestEnd.ABORTED)
        second = promised(decode, request_of("a", tokens(100, first=1000)), 96)
        report = decode.step([second])
        assert not report.invalid_block_ids
        assert decode.is_right(second[0].token_ids, second[1], 100)


# -- peers that go, fail and come back -----------------------------------------------------------


class Failing(Pipe):
    """Fails with an error of its own choice once it is told to."""

    def __init__(self, pipe: Pipe, switch: dict[str, Any]) -> None:
        self._pipe, self._switch = pipe, switch
        switch.setdefault("pipes", []).append(self)

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    @property
    def peer(self) -> str:
        return self._pipe.peer

    def send_tensor(self, tensor: Any, *, timeout: Any = DEFAULT_TIMEOUT) -> Any:
        if (error := self._switch.pop("error", None)) is not None:
            raise error
        return self._pipe.send_tensor(tensor, timeout=timeout)

    def recv_tensor(self, out: Any = None, *, timeout: Any = DEFAULT_TIMEOUT) -> Any:
        return self._pipe.recv_tensor(out, timeout=timeout)

    def close(self, timeout: Any = DEFAULT_TIMEOUT) -> None:
        self._pipe.close(timeout)

    def abort(self) -> None:
        self._pipe.abort()


@pytest.mark.parametrize("error", [TransportError("odd"), PeerGoneError("odd"), WireError("odd")])
def test_after_any_failure_of_the_pipes_the_next_load_dials_again(error: Exception) -> None:
    switch: dict[str, Any] = {}
    with EngineDouble(config("producer"), listen="unix:", seed=1) as prefill:
        prefill.prefill(request_of("stored", tokens(100)))
        with EngineDouble(
            config("consumer"),
            connect=prefill.worker.contact,
            seed=2,
            wrap_pipe=lambda pipe: Failing(pipe, switch),
        ) as decode:
            decode.worker.wait_until_ready(10)
            switch["error"] = error
            _, _, report = decode.load(request_of("a", tokens(100)))
            assert report.invalid_block_ids
            blocks, _, report = decode.load(request_of("b", tokens(100)))
            assert not report.invalid_block_ids
            assert decode.is_right(tuple(tokens(100)), blocks, 100)


def test_the_first_load_from_a_producer_that_came_back_succeeds() -> None:
    host = {"host": "unix:@kvplug-test-first-load"}
    with contextlib.ExitStack() as stack:
        with EngineDouble(config("producer", **host), seed=1) as prefill:
            decode = stack.enter_context(EngineDouble(config("consumer", **host), seed=2))
            decode.worker.wait_until_ready(10)
            decode.scheduler.wait_until_ready(10)
        with EngineDouble(config("producer", **host), seed=1) as prefill:
            prefill.prefill(request_of("stored", tokens(100)))
            until = time.monotonic() + 10
            while decode.matched(request_of(f"ask{time.monotonic()}", tokens(100)))[0] != 96:
                assert time.monotonic() < until
            blocks, _, report = decode.load(request_of("a", tokens(100)))
            assert not report.invalid_block_ids
            assert decode.is_right(tuple(tokens(100)), blocks, 100)


def test_what_only_workers_know_to_differ_is_promised_once(caplog: pytest.LogCaptureFixture) -> None:
    """A kernel's own order of blocks, say. Otherwise each request would fail, one after the other."""
    host = {"host": "unix:@kvplug-test-refused"}

    def engine(role: str, block_format: str) -> EngineDouble:
        return EngineDouble(config(role, **host), axes="KBHTD", block_format=block_format)

    with engine("consumer", "one kernel's") as decode:
        with engine("producer", "another one's") as prefill:
            decode.scheduler.wait_until_ready(10)
            prefill.prefill(request_of("stored", tokens(100)))
            _, loaded, report = decode.load(request_of("a", tokens(100)))
            assert (loaded, len(report.invalid_block_ids)) == (96, 6)
            for name in "bcd":
                assert decode.matched(request_of(name, tokens(100))) == (0, False)
        assert caplog.text.count("nothing is loaded from the peer engine's worker 0 any more") == 1
        with engine("producer", "one kernel's") as prefill:
            prefill.prefill(request_of("stored", tokens(100)))
            until = time.monotonic() + 20
            while decode.matched(request_of(f"ask{time.monotonic()}", tokens(100)))[0] != 96:
                assert time.monotonic() < until
            blocks, _, report = decode.load(request_of("e", tokens(100)))
            assert not report.invalid_block_ids
            assert decode.is_right(tuple(tokens(100)), blocks, 100)


def test_a_producer_that_died_before_the_first_load_delays_the_step_by_little() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        scheduled = promised(decode, request_of("a", tokens(100)), 96)
        prefill.scheduler.shutdown()
        prefill.worker.shutdown()
        begun = time.monotonic()
        report = decode.step([scheduled])
        assert report.invalid_block_ids == frozenset(scheduled[1][:6])
        assert time.monotonic() - begun < 4


class FakeChannel:
    """Takes what is sent and never answers."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.answers: list[Any] = []
        self._changed = threading.Condition()
        self._closed = False

    def send(self, value: Any, timeout: Any = None) -> None:
        self.sent.append(value)

    def answer(self, value: Any) -> None:
        with self._changed:
            self.answers.append(value)
            self._changed.notify_all()

    def recv(self, timeout: Any = None) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.answers)
            if self._closed:
                raise ClosedError("closed")
            return self.answers.pop(0)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class FakeLink:
    def __init__(self) -> None:
        self.channel = FakeChannel()
        self.close = self.channel.close


def test_a_store_that_does_not_answer_is_asked_by_one_ping_at_a_time(eventually: Any) -> None:
    links: list[FakeLink] = []

    def connect(timeout: float) -> FakeLink:
        links.append(FakeLink())
        return links[-1]

    replica = Replica(connect, rank=0, fence_timeout_s=0.5)  # type: ignore[arg-type]
    try:
        eventually(lambda: replica.link is not None)
        channel = links[-1].channel
        fences = [replica.fence() for _ in range(1000)]
        assert len(channel.sent) == 1
        assert not replica.has_passed(fences[0])
        for _ in range(3):  # answered, the next ping stands for all that came meanwhile
            channel.answer({"pong": channel.sent[-1]["ping"]})
            time.sleep(0.05)
        eventually(lambda: replica.has_passed(fences[-1]))
        assert len(channel.sent) == 2
    finally:
        replica.close()


def test_after_a_gap_the_answer_is_not_yet_until_a_snapshot_has_come(eventually: Any) -> None:
    links: list[FakeLink] = []
    may_connect = threading.Event()
    may_connect.set()

    def connect(timeout: float) -> FakeLink:
        may_connect.wait(20)
        links.append(FakeLink())
        return links[-1]

    log = EventLog()
    replica = Replica(connect, rank=0, fence_timeout_s=0.5)  # type: ignore[arg-type]
    try:
        eventually(lambda: len(links) == 1)
        assert replica.match((1, 2, 3), b"") is None  # the snapshot has not come
        for event in log.snapshot():
            links[0].channel.answer(event_to_plain(event))
        eventually(lambda: replica.match((1, 2, 3), b"") == 0)
        may_connect.clear()
        log.stored(1, [1, 2])  # lost on the way
        links[0].channel.answer(event_to_plain(log.stored(2, [1, 2, 3])))
        eventually(lambda: replica.match((1, 2, 3), b"") is None)
        time.sleep(0.1)
        assert replica.match((1, 2, 3), b"") is None
        may_connect.set()
        eventually(lambda: len(links) == 2)
        assert replica.match((1, 2, 3), b"") is None
        for event in log.snapshot():
            links[1].channel.answer(event_to_plain(event))
        eventually(lambda: replica.match((1, 2, 3), b"") == 3)
    finally:
        may_connect.set()
        replica.close()


def test_after_a_load_that_timed_out_nothing_is_promised_until_the_store_answers(eventually: Any) -> None:
    link = FakeLink()
    replica = Replica(lambda _: link, rank=0, fence_timeout_s=0.5)  # type: ignore[arg-type,return-value]
    try:
        link.channel.answer({"event": "snapshot", "epoch": "e", "seq": 1, "count": 1})
        stored = Stored(epoch="e", seq=1, entry_id=1, packed_tokens=pack_tokens(range(16)))
        link.channel.answer(event_to_plain(stored))
        eventually(lambda: replica.match(tuple(range(16)), b"") == 16)
        replica.doubt()
        replica.doubt()
        assert replica.match(tuple(range(16)), b"") == 0
        assert len(link.channel.sent) == 1
        link.channel.answer({"pong": link.channel.sent[0]["ping"]})
        eventually(lambda: replica.match(tuple(range(16)), b"") == 16)
    finally:
        replica.close()


def test_what_is_promised_is_what_every_shard_holds() -> None:
    class Shard:
        link = None

        def __init__(self, held: int | None) -> None:
            self.held = held

        def fence(self) -> None:
            return None

        def has_passed(self, fence: Any) -> bool:
            return True

        def match(self, token_ids: Any, extra: bytes) -> int | None:
            return self.held

    with EngineDouble(config("consumer"), connect="unix:@kvplug-test-shards") as decode:
        ours = decode.scheduler._replicas
        try:
            for number, (shards, expected) in enumerate(
                [((96, 40), 32), ((40, 96), 32), ((96, 0), 0), ((96, None), None), ((15, 96), 0)]
            ):
                decode.scheduler._replicas = tuple(Shard(held) for held in shards)
                asked = request_of(f"a{number}", tokens(100))
                assert decode.scheduler.get_num_new_matched_tokens(asked, 0) == (expected, False)
        finally:
            decode.scheduler._replicas = ours


@pytest.mark.parametrize("odd", [5, {"pong": "x"}, {"event": "none"}, {"event": "removed"}, [1], None])
def test_a_replica_survives_what_it_does_not_understand(odd: Any, eventually: Any) -> None:
    links: list[FakeLink] = []

    def connect(timeout: float) -> FakeLink:
        links.append(FakeLink())
        return links[-1]

    replica = Replica(connect, rank=0, fence_timeout_s=0.5)  # type: ignore[arg-type]
    try:
        eventually(lambda: replica.link is not None)
        links[0].channel.answer(odd)
        eventually(lambda: len(links) > 1)
        links[1].channel.answer({"event": "snapshot", "epoch": "e", "seq": 0, "count": 0})
        eventually(lambda: replica.match((1, 2), b"") == 0)
    finally:
        replica.close()


@pytest.mark.parametrize("odd", [5, {"ping": "x"}, {}, None])
def test_a_publisher_ends_when_it_does_not_understand(odd: Any) -> None:
    with EngineDouble(config("producer"), listen="unix:") as prefill:
        service = prefill.worker._service
        link: Any = FakeLink()
        link.agreement = type("A", (), {"remote": type("R", (), {"engine_id": "x", "purpose": "events"})})
        thread = threading.Thread(target=service._serve, args=(link,), daemon=True)
        thread.start()
        link.channel.answer(odd)
        thread.join(5)
        assert not thread.is_alive()
        assert link.channel._closed


def test_a_store_of_more_entries_than_a_follower_may_lag_is_followed(monkeypatch: Any) -> None:
    monkeypatch.setattr(serve, "_MAX_LAG_BYTES", 300)
    with EngineDouble(config("producer"), listen="unix:") as prefill:
        for n in range(10):
            prefill.prefill(request_of(f"p{n}", tokens(20, first=1000 * n)))
        with EngineDouble(config("consumer"), connect=prefill.worker.contact) as decode:
            decode.scheduler.wait_until_ready(5)
            assert decode.matched(request_of("a", tokens(20)))[0] == 16


class HalfLink(FakeLink):
    """Opens one pipe and no second."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Any] = []

    def open_pipe(self, label: str, **_: Any) -> Any:
        if self.opened:
            raise PeerGoneError("gone in between")
        self.opened.append(Opened())
        return self.opened[0]


class Opened:
    peer = "nobody"
    ended = False

    def abort(self) -> None:
        self.ended = True

    def close(self, timeout: Any = None) -> None:
        self.ended = True


def test_a_peer_that_goes_between_its_two_pipes_leaves_none_open() -> None:
    with pair() as (prefill, decode):
        link: Any = HalfLink()
        link.agreement = type("A", (), {"remote": type("R", (), {"engine_id": "x", "purpose": "entries"})})
        prefill.worker._service._serve(link)
        assert link.opened[0].ended and link.channel._closed

        other = HalfLink()
        decode.worker._context.peers.connect = lambda *_, **__: other
        with pytest.raises(PeerGoneError):
            decode.worker.wait_until_ready(1)
        assert other.opened[0].ended and other.channel._closed


class Stuck:
    """A buffer whose store is stopped: each call takes the time it is given."""

    def select(self, *_: Any, timeout: float, **__: Any) -> None:
        time.sleep(timeout)
        raise TimeoutError("stopped")


def test_loads_that_wait_behind_one_another_for_a_stopped_store_end_in_time(load: Load) -> None:
    loads = [made(load.plan, load._layout, load._caches) for _ in range(8)]
    loader = Loader(lambda _: Stuck(), timeout_s=0.5)  # type: ignore[arg-type,return-value]
    try:
        begun = time.monotonic()
        for each in loads:
            loader.submit(each)
        while not all(each.has_ended for each in loads):
            assert time.monotonic() - begun < 2
            time.sleep(0.01)
    finally:
        loader.close()


# -- saving --------------------------------------------------------------------------------------


def test_a_step_that_completes_many_prompts_saves_them_all() -> None:
    with pair() as (prefill, decode):
        scheduled = []
        for n in range(24):
            prompt = request_of(f"p{n}", tokens(20, first=1000 * n))
            blocks = prefill.allocate(20)
            prefill.scheduler.on_new_request(prompt)
            prefill.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
            scheduled.append((prompt, blocks, 0, 20))
        prefill.step(scheduled)
        for n in range(24):
            assert decode.matched(request_of(f"d{n}", tokens(20, first=1000 * n)))[0] == 16


def test_a_prompt_that_comes_twice_in_a_step_is_stored_once() -> None:
    with pair() as (prefill, decode):
        scheduled = []
        for name in "ab":
            prompt, blocks = request_of(name, tokens(20)), prefill.allocate(20)
            prefill.scheduler.on_new_request(prompt)
            prefill.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
            scheduled.append((prompt, blocks, 0, 20))
        prefill.step(scheduled)
        assert decode.matched(request_of("c", tokens(20)))[0] == 16
        assert len(prefill.worker._store) == 1


def test_what_is_gathered_and_not_yet_stored_is_bounded_in_bytes() -> None:
    options = {"lookup": {"max_unsaved": 3 * KV_OF_100_TOKENS}}
    with EngineDouble(config("producer", options=options), listen="unix:", num_blocks=128) as prefill:
        requests = [request_of(f"p{n}", tokens(100, first=1000 * n)) for n in range(5)]
        blocks = [prefill.allocate(100) for _ in requests]
        for prompt, table in zip(requests, blocks, strict=True):
            prefill.scheduler.on_new_request(prompt)
            prefill.scheduler.update_state_after_alloc(prompt, (table,), 0)
        prefill.step([(prompt, table, 0, 50) for prompt, table in zip(requests, blocks, strict=True)])
        assert prefill.figures()["failures"]["save"] == {"no_room": 2}
        prefill.step([(prompt, table, 50, 50) for prompt, table in zip(requests, blocks, strict=True)])
        prefill.worker._saver.settle()
        assert len(prefill.worker._store) == 3
        assert prefill.worker._saver.bytes_unsaved == 0


def test_a_prompt_larger_than_the_store_is_not_even_gathered() -> None:
    small = {"buffer_size": KV_OF_100_TOKENS // 2}
    with EngineDouble(config("producer", **small), listen="unix:") as prefill:
        prefill.prefill(request_of("a", tokens(100)), chunk=50)
        assert prefill.worker._saver.bytes_unsaved == 0
        assert prefill.figures()["failures"]["save"] == {"too_large": 1}


# -- the end -------------------------------------------------------------------------------------


def test_shutdown_does_not_wait_for_a_producer_that_never_comes() -> None:
    decode = EngineDouble(config("consumer", connect_timeout_s=60), connect="unix:@kvplug-test-never-comes")
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            decode.worker.wait_until_ready(60)
        except BaseException as e:
            outcome.append(e)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.3)
    begun = time.monotonic()
    decode.worker.shutdown()
    decode.scheduler.shutdown()
    assert time.monotonic() - begun < 3
    waiting.join(3)
    assert isinstance(outcome[0], ClosedError)


def test_shutdown_does_not_wait_for_room_in_a_full_store() -> None:
    options = {"simple": {"evict": "never"}, "lookup": {"save_timeout_s": 30}}
    full = {"buffer_size": int(1.5 * KV_OF_100_TOKENS), "options": options}
    with EngineDouble(config("producer", **full), listen="unix:") as prefill:
        for n in range(3):
            prefill.prefill(request_of(f"p{n}", tokens(100, first=1000 * n)))
        time.sleep(0.2)
        begun = time.monotonic()
        prefill.worker.shutdown()
        assert time.monotonic() - begun < 3
        assert not prefill.worker._saver._thread.is_alive()
