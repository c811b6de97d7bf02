"""A replica of a store whose peer goes, is silent or is not understood."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import faulty_engines as engines
from kvplug import ClosedError, PeerGoneError
from kvplug.transport import EventLog, Stored, event_to_plain, pack_tokens
from kvplug_lookup.connector import replica as replicas
from kvplug_lookup.connector.replica import Replica
from kvplug_testing.engine import FakeEngine

config, pair = engines.config, engines.pair

pytestmark = pytest.mark.timeout(60)


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


SNAPSHOT = {"event": "snapshot", "epoch": "e", "seq": 1, "count": 1}
STORED = event_to_plain(Stored(epoch="e", seq=1, entry_id=1, packed_tokens=pack_tokens(range(16))))


def with_lies(**changed: Any) -> list[Any]:
    return [SNAPSHOT, {**STORED, **changed}]


@pytest.mark.parametrize(
    "lies",
    [
        [5],
        [None],
        [[1]],
        [{"event": "none"}],
        [{"event": "removed"}],
        [{"pong": "x"}],
        [{"pong": [1]}],
        [{"pong": 10**6}],  # of a ping that was never sent
        [{"pong": -1}],
        [{"pong": "9" * 5000}],
        with_lies(tokens=b""),
        with_lies(tokens=b"odd"),
        with_lies(entry_id=-1),
        with_lies(entry_id=2**63 - 1),
        with_lies(seq=2**64 - 1),
        [SNAPSHOT, STORED, {**STORED, "seq": 2}],  # the same entry twice
        [SNAPSHOT, STORED, {"event": "removed", "epoch": "e", "seq": 2, "entry_id": 9, "reason": "taken"}],
    ],
)
def test_a_replica_survives_what_cannot_be(lies: list[Any], eventually: Any) -> None:
    links: list[FakeLink] = []

    def connect(timeout: float) -> FakeLink:
        links.append(FakeLink())
        return links[-1]

    replica = Replica(connect, rank=0, fence_timeout_s=0.5)  # type: ignore[arg-type]
    try:
        eventually(lambda: replica.link is not None)
        for lie in lies:
            links[0].channel.answer(lie)
        eventually(lambda: len(links) > 1)
        links[1].channel.answer({"event": "snapshot", "epoch": "e", "seq": 0, "count": 0})
        eventually(lambda: replica.match((1, 2), b"") == 0)
    finally:
        replica.close()


def test_a_store_that_never_completes_its_snapshot_is_waited_for_only_for_a_while(
    eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_CATCH_UP_S", 0.5)
    link = FakeLink()
    replica = Replica(lambda _: link, rank=0, fence_timeout_s=0.1)  # type: ignore[arg-type,return-value]
    try:
        link.channel.answer({"event": "snapshot", "epoch": "e", "seq": 2**60, "count": 2**60})
        eventually(lambda: replica.link is not None)
        assert replica.match((1, 2), b"") is None
        eventually(lambda: replica.match((1, 2), b"") == 0)
        assert replica.link is link  # it may catch up
    finally:
        replica.close()


def test_a_store_whose_events_always_have_gaps_is_waited_for_only_for_a_while(
    eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_CATCH_UP_S", 0.5)
    links: list[FakeLink] = []

    def connect(timeout: float) -> FakeLink:
        links.append(FakeLink())
        links[-1].channel.answer({**STORED, "seq": 7})  # before any snapshot
        return links[-1]

    replica = Replica(connect, rank=0, fence_timeout_s=0.1)  # type: ignore[arg-type]
    try:
        eventually(lambda: len(links) > 1)
        assert replica.match((1, 2), b"") is None
        eventually(lambda: replica.match((1, 2), b"") == 0)
        time.sleep(0.3)
        assert replica.match((1, 2), b"") == 0
        assert len(links) < 12  # with growing pauses, not as fast as it can
    finally:
        replica.close()


def test_an_index_without_end_is_given_up(eventually: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_MAX_BYTES", 3 * 1200)
    links: list[FakeLink] = []

    def connect(timeout: float) -> FakeLink:
        links.append(FakeLink())
        return links[-1]

    replica = Replica(connect, rank=0, fence_timeout_s=0.1)  # type: ignore[arg-type]
    try:
        eventually(lambda: replica.link is not None)
        log = EventLog()
        for event in [*log.snapshot(), *(log.stored(number, range(16)) for number in (1, 2))]:
            links[0].channel.answer(event_to_plain(event))
        links[0].channel.answer(event_to_plain(log.removed(1, "taken")))  # gives its bytes back
        links[0].channel.answer(event_to_plain(log.stored(3, range(16))))
        links[0].channel.answer(event_to_plain(log.stored(4, range(16))))
        eventually(lambda: replica.match(tuple(range(16)), b"") == 16)
        assert len(links) == 1
        links[0].channel.answer(event_to_plain(log.stored(5, range(16))))
        eventually(lambda: len(links) == 2)
    finally:
        replica.close()


@pytest.mark.parametrize("odd", [5, {"ping": "x"}, {}, None])
def test_a_publisher_ends_when_it_does_not_understand(odd: Any) -> None:
    with FakeEngine(config("producer"), listen="unix:") as prefill:
        service = prefill.worker._service
        link: Any = FakeLink()
        link.agreement = type("A", (), {"remote": type("R", (), {"engine_id": "x", "purpose": "events"})})
        thread = threading.Thread(target=service._serve, args=(link,), daemon=True)
        thread.start()
        link.channel.answer(odd)
        thread.join(5)
        assert not thread.is_alive()
        assert link.channel._closed


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
