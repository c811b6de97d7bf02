"""Peers of the connector "lookup" that go, fail, stop and come back."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

import faulty_engines as engines
from kvplug import PeerGoneError, TimeoutError, TransportError
from kvplug.transport import DEFAULT_TIMEOUT, Pipe, WireError
from kvplug_lookup.connector import serve
from kvplug_lookup.connector.load import Load, Loader
from kvplug_testing.engine import FakeEngine, request_of

config, pair, tokens, promised = engines.config, engines.pair, engines.tokens, engines.promised
made, load = engines.made, engines.load

pytestmark = pytest.mark.timeout(60)


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
    with FakeEngine(config("producer"), listen="unix:", seed=1) as prefill:
        prefill.prefill(request_of("stored", tokens(100)))
        with FakeEngine(
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
        with FakeEngine(config("producer", **host), seed=1) as prefill:
            decode = stack.enter_context(FakeEngine(config("consumer", **host), seed=2))
            decode.worker.wait_until_ready(10)
            decode.scheduler.wait_until_ready(10)
        with FakeEngine(config("producer", **host), seed=1) as prefill:
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

    def engine(role: str, block_format: str) -> FakeEngine:
        return FakeEngine(config(role, **host), axes="KBHTD", block_format=block_format)

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

    with FakeEngine(config("consumer"), connect="unix:@kvplug-test-shards") as decode:
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


def test_a_store_of_more_entries_than_a_follower_may_lag_is_followed(monkeypatch: Any) -> None:
    monkeypatch.setattr(serve, "_MAX_LAG_BYTES", 300)
    with FakeEngine(config("producer"), listen="unix:") as prefill:
        for n in range(10):
            prefill.prefill(request_of(f"p{n}", tokens(20, first=1000 * n)))
        with FakeEngine(config("consumer"), connect=prefill.worker.contact) as decode:
            decode.scheduler.wait_until_ready(5)
            assert decode.matched(request_of("a", tokens(20)))[0] == 16


class Stuck:
    """A buffer whose store is stopped: each call takes the time it is given."""

    def select(self, *_: Any, timeout: float, **__: Any) -> None:
        time.sleep(timeout)
        raise TimeoutError("stopped")


def test_loads_that_wait_behind_one_another_for_a_stopped_store_end_in_time(load: Load) -> None:
    loads = [made(load.plan, load._layout, load._caches) for _ in range(8)]
    loader = Loader(lambda _: Stuck(), timeout_s=0.5, stall_timeout_s=20)  # type: ignore[arg-type,return-value]
    try:
        begun = time.monotonic()
        for each in loads:
            loader.submit(each)
        while not all(each.has_ended() for each in loads):
            assert time.monotonic() - begun < 2
            time.sleep(0.01)
    finally:
        loader.close()
