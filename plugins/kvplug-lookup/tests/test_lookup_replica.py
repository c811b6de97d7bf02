"""The replica of a store's index whose peer leaves, is silent, or sends wrong or malformed messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from kvplug import ClosedError, TimeoutError
from kvplug.engine import Engine, Parallelism
from kvplug.transport import Deadline, PageEvent, Presence, Series
from kvplug_lookup.connector import replica as replicas
from kvplug_lookup.connector.engines import EngineSources
from kvplug_lookup.connector.keys import hello_of
from kvplug_lookup.connector.replica import Replica
from kvplug_lookup.connector.sources import Source
from kvplug_testing import limits
from kvplug_testing.engine import MODEL, FakeEngine
from kvplug_testing.waits import until
from lookup_engines import config

pytestmark = pytest.mark.timeout(60)

CHAINS = [bytes([number]) * 32 for number in range(1, 5)]
HELD, COMING = Presence.HELD, Presence.COMING


class FakeLink:
    """A link whose other end is the test."""

    def __init__(self, *messages: Any) -> None:
        self.channel = self
        self.sent: list[Any] = []
        self._answers: list[Any] = list(messages)
        self._changed = threading.Condition()
        self.closed = False
        self.is_full = False
        self.waited: list[float] = []
        """Timeouts of the messages that could not be sent."""

    def send(self, value: Any, timeout: Any = None) -> None:
        if self.is_full:
            self.waited.append(timeout)
            raise TimeoutError("earlier messages are not read")
        self.sent.append(value)

    def answer(self, *values: Any) -> None:
        with self._changed:
            self._answers += values
            self._changed.notify_all()

    def recv(self, timeout: Any = None) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._answers, 20)
            if self.closed or not self._answers:
                raise ClosedError("closed")
            return self._answers.pop(0)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()


class Followed:
    """A replica, and the links that it has made."""

    def __init__(self, series: Series, hello: dict[str, Any], wait_timeout_s: float) -> None:
        self.series, self.log = series, PageEvent.Log()
        self.links: list[FakeLink] = []
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.first: list[Any] = [hello]

        def connect(*_: Any, timeout: float, **__: Any) -> Any:
            if not self.may_connect.wait(timeout):
                raise TimeoutError("it may not connect")
            self.links.append(FakeLink(*self.first))
            return self.links[-1]

        peers = Mock(connect=connect, address_of=lambda rank, peer: "an address")
        options = Mock(wait_timeout_s=wait_timeout_s)
        self.replica = Replica(Mock(peers=peers, model=MODEL, options=options), 0, "a worker")
        until(lambda: self.replica.link is not None)

    def keys(self, *chains: bytes) -> list[bytes]:
        return self.series.keys_of(list(chains))

    def stored(self, *chains: bytes) -> PageEvent:
        return self.log.stored(self.series.id, self.keys(*chains))

    def send(self, *events: PageEvent) -> None:
        self.links[-1].answer(*map(PageEvent.to_plain, events))

    def snapshot(self, *chains: bytes) -> None:
        self.send(*self.log.snapshot({self.series.id: self.keys(*chains)} if chains else {}))

    def pong(self) -> None:
        self.links[-1].answer({"pong": self.links[-1].sent[-1]["ping"]})

    def until(self, expected: list[Presence] | None) -> None:
        until(lambda: self.replica.presences(CHAINS, 0) == expected, 10, f"the answer {expected}")


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[Series, dict[str, Any]]]:
    """The series of an engine's pages, and the first message about its store."""
    with FakeEngine(config("producer"), listen="unix:") as engine:
        tier = engine.worker.first_tier
        hello = hello_of(engine.worker.shard, MODEL, "host", tier.store.seal.id)
        yield tier.series, hello


@pytest.fixture
def follow(store: tuple[Series, dict[str, Any]]) -> Iterator[Callable[..., Followed]]:
    made: list[Followed] = []

    def make(wait_timeout_s: float = 0.5) -> Followed:
        made.append(Followed(*store, wait_timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.may_connect.set()
        each.replica.close()


def test_stored_declared_removed_and_cleared_pages_are_followed(follow: Any) -> None:
    it = follow()
    it.until(None)  # the snapshot has not come
    it.snapshot(CHAINS[0])
    it.until([HELD])
    it.send(it.log.declared(it.series.id, it.keys(CHAINS[1]), 30.0), it.stored(CHAINS[2]))
    it.until([HELD, COMING, HELD])
    it.send(it.log.stored(bytes(16), it.keys(CHAINS[3])))  # of another series
    it.send(it.stored(CHAINS[1]), it.log.removed(it.series.id, it.keys(CHAINS[0]), PageEvent.Removal.EVICTED))
    it.until([])
    assert it.replica.presences(CHAINS, 1) == [HELD, HELD]
    it.send(it.log.cleared(), it.stored(CHAINS[0]), it.log.declared(it.series.id, it.keys(CHAINS[1]), 0.05))
    it.until([HELD])  # the declared page did not arrive in time


def test_a_silent_store_gets_one_ping_at_a_time_and_is_waited_for_once(follow: Any) -> None:
    it = follow()
    it.snapshot(CHAINS[0])
    fences = [it.replica.fence() for _ in range(1000)]
    assert len(it.links[0].sent) == 1
    assert not it.replica.has_passed(fences[0])
    until(lambda: it.replica.has_passed(fences[-1]))
    late = it.replica.fence()
    assert it.replica.has_passed(late), "a request waits again for the silent store"
    assert it.replica.presences(CHAINS, 0) == []
    it.pong()
    until(lambda: len(it.links[0].sent) == 2)  # which stands for all that came meanwhile
    assert it.replica.presences(CHAINS, 0) == []
    it.pong()
    it.until([HELD])


def test_a_ping_that_could_not_be_sent_is_sent_with_the_next_call_about_its_request(follow: Any) -> None:
    it = follow(wait_timeout_s=30)
    it.snapshot(CHAINS[0])
    it.until([HELD])
    it.links[0].is_full = True
    fence = it.replica.fence()
    for _ in range(3):
        assert not it.replica.has_passed(fence)
    assert not any(it.links[0].waited[1:]), "an engine's step waits for a peer that does not read"
    it.links[0].is_full = False
    assert not it.replica.has_passed(fence)
    assert len(it.links[0].sent) == 1
    it.pong()
    until(lambda: it.replica.has_passed(fence))


@pytest.mark.parametrize("is_silent", [False, True])
def test_after_a_stall_or_a_reset_nothing_is_promised_until_a_ping_sent_since_is_answered(
    follow: Any, is_silent: bool
) -> None:
    it = follow()
    it.snapshot(CHAINS[0])
    it.until([HELD])
    it.replica.fence()  # its ping was sent before
    it.replica.doubt(is_silent=is_silent)
    assert len(it.links[0].sent) == 1
    it.pong()
    until(lambda: len(it.links[0].sent) == 2)
    assert it.replica.presences(CHAINS, 0) == []
    it.pong()
    it.until([HELD])


def test_after_a_gap_the_answer_is_not_yet_until_a_snapshot_has_come(follow: Any) -> None:
    it = follow()
    it.snapshot()
    it.until([])
    it.may_connect.clear()
    it.stored(CHAINS[0])  # lost on the way
    it.send(it.stored(CHAINS[1]))
    it.until(None)
    it.may_connect.set()
    until(lambda: len(it.links) == 2)
    assert it.replica.presences(CHAINS, 0) is None
    it.snapshot(*CHAINS[:2])
    it.until([HELD, HELD])


@pytest.mark.parametrize(
    "lies",
    [
        [5],
        [{"event": "removed"}],
        [{"pong": 10**6}],  # of a ping that was never sent
        [{"event": "stored", "epoch": "e", "seq": 1, "series": b"", "keys": [b"short"]}],
    ],
)
def test_a_replica_survives_malformed_messages(follow: Any, lies: list[Any]) -> None:
    it = follow()
    it.links[0].answer(*lies)
    until(lambda: len(it.links) > 1)
    assert it.links[0].closed
    it.snapshot(CHAINS[0])
    it.until([HELD])


def test_requests_wait_only_a_while_for_a_store_that_never_completes_its_snapshot(
    follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_CATCH_UP_S", 0.5)
    it = follow()
    first, *_ = it.log.snapshot({it.series.id: it.keys(CHAINS[0])})
    it.send(first)
    assert it.replica.presences(CHAINS, 0) is None
    it.until([])
    assert it.replica.link is it.links[0]  # it may catch up
    with pytest.raises(TimeoutError, match="a worker at an address is connected, but did not send all"):
        it.replica.wait_until_ready(Deadline.after(0.1))


def test_an_index_that_grows_without_limit_is_dropped(follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_MAX_PAGES", 2)
    it = follow()
    it.snapshot(CHAINS[0])
    it.send(it.stored(CHAINS[1]))
    it.until([HELD, HELD])
    it.send(it.stored(CHAINS[2]))
    until(lambda: len(it.links) == 2)


def test_an_engine_whose_workers_cannot_all_be_followed_is_followed_later_without_a_thread_left() -> None:
    closed = threading.Event()
    context = Mock(parallelism=Parallelism(num_workers=2))
    context.peers.connect.side_effect = lambda *args, **given: closed.wait() and FakeLink()
    context.members.model = "m"
    engine = Engine(engine_id="a", epochs=("", ""), contacts={0: "x", 1: "y"}, role="both", model="m")
    engines, sources = EngineSources(context), list[Source]()
    engines.follow()
    update = context.members.follow.call_args.args[0]
    with limits.threads(1), pytest.raises(RuntimeError):
        update((engine,), False)
    engines.update(sources)
    assert not sources
    update((engine,), False)
    engines.update(sources)
    assert [source.name for source in sources] == ["peer a"]

    def num_threads() -> int:
        return sum(thread.name == "kvplug-lookup-replica" for thread in threading.enumerate())

    closed.set()
    until(lambda: num_threads() == 2, what="the end of the thread of the first attempt")
    engines.close()  # also links that have not sent their first message
    assert num_threads() == 0
