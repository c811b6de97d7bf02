"""The store alone: pure rules of keys, and of calls that several ranks make."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.net.trust.identity import PeerIdentity
from kvplug.transport.group.store import Store
from kvplug_testing.waits import Call


def identity(rank: int) -> PeerIdentity:
    return PeerIdentity(pid=100 + rank, label=f"worker {rank}")


@pytest.fixture
def store() -> Store:
    made = Store(3)
    for rank in (1, 2):
        made.join(rank, 3, identity(rank))
    return made


def ask(store: Store, rank: int, *request: Any) -> Any:
    status, value = store.answer(rank, request)
    assert status == "ok", value
    return value


def give(store: Store, rank: int, call: str, number: int, readers: list[int], data: bytes) -> Any:
    return store.answer(rank, ("exchange", call, number, readers, data, [], 0))


def meet(store: Store, rank: int, call: str, data: bytes, wait: float | None = 0) -> Any:
    """A call of all ranks."""
    return store.answer(rank, ("exchange", call, 0, [0, 1, 2], data, [0, 1, 2], wait))


def test_a_rank_that_is_gone_ends_the_waits_for_it_and_takes_its_letters_along(store: Store) -> None:
    give(store, 1, "send", 0, [2], b"never read")
    give(store, 2, "send", 0, [1], b"last words")
    waiting = Call(lambda: meet(store, 1, "barrier", b"", None))
    assert waiting.is_blocked(0.05)
    store.part(2, "is gone")
    status, text = waiting.result(5)
    assert status == "gone" and "rank 2 (worker 2, pid 102) is gone" in text
    assert ask(store, 1, "exchange", "send", 0, [], b"", [2], 0) == [b"last words"]
    ask(store, 1, "taken", "send", 0, [2])
    assert store.answer(1, ("exchange", "send", 1, [], b"", [2], None))[0] == "gone"
    give(store, 0, "send", 0, [2], b"to no rank")
    assert store.num_entries == 1, "the barrier that can never be complete"


def test_a_round_that_was_complete_is_given_to_all_though_one_has_gone_since(store: Store) -> None:
    for rank in (1, 2):
        meet(store, rank, "r", bytes([rank]))
    store.part(2, "is gone")
    assert meet(store, 0, "r", b"\0") == ("ok", [b"\0", b"\1", b"\2"])
    assert meet(store, 1, "r", b"") == ("ok", [b"\0", b"\1", b"\2"])
    ask(store, 0, "taken", "r", 0, [0, 1, 2])
    ask(store, 1, "taken", "r", 0, [0, 1, 2])
    assert store.num_entries == 0


def test_only_the_process_that_joined_may_send_requests_as_that_rank(store: Store) -> None:
    assert store.is_member(1, PeerIdentity(pid=101, label="another label"))
    assert not store.is_member(1, identity(2))
    assert not store.is_member(7, identity(1))
    store.part(1, "has left")
    assert not store.is_member(1, identity(1))


# -- what a rank may make rank 0 hold --------------------------------------------------------------


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch, store: Store) -> Store:
    monkeypatch.setattr("kvplug.transport.group.store.MAX_BYTES", 10 * 2048)
    return store


def requests(number: int, data: bytes) -> list[tuple[Any, ...]]:
    return [
        ("set", f"k{number}", data),
        ("exchange", "send", number, [2], data, [], 0),
        ("exchange", "barrier", number, [0, 1, 2], data, [0, 1, 2], 0),
    ]


@pytest.mark.parametrize("which", range(3))
def test_what_a_rank_makes_the_store_hold_is_bounded(little: Store, which: int) -> None:
    answers = [little.answer(1, requests(number, bytes(1024))[which]) for number in range(30)]
    assert [status for status, _ in answers].count("large") == 20
    assert little.nbytes <= 10 * 2048
    status, text = little.answer(1, requests(99, b"")[which])
    assert status == "large" and "has no room for 1024 more" in text


def test_room_is_there_again_when_values_were_taken_and_deleted(little: Store) -> None:
    for number in range(5):
        ask(little, 1, "set", f"k{number}", bytes(1024))
        ask(little, 1, "set", f"k{number}", bytes(1000))  # in its place
        give(little, 1, "send", number, [0, 2, 2, 9], bytes(1))
        ask(little, 1, "add", f"n{number}", 1)
        for rank in range(3):
            meet(little, rank, f"round {number}", b"x")
        for rank in range(3):
            ask(little, rank, "taken", f"round {number}", 0, [0, 1, 2])
        ask(little, 1, "delete", f"k{number}")
        ask(little, 1, "delete", f"n{number}")
        ask(little, 0, "taken", "send", number, [1])
        ask(little, 2, "taken", "send", number, [1])
        assert little.nbytes == 0 and little.num_entries == 0
    give(little, 1, "send", 9, [2], bytes(1024))
    little.part(2, "is gone")
    assert little.nbytes == 0


REQUESTS: list[Any] = [
    *(None, 7, (), "set", ("nonsense", 1), ("__class__",), ([], 1), ({"a": 1},)),
    *(
        ("set",),
        ("set", "k"),
        ("set", 1, b""),
        ("set", "", b""),
        ("set", "k" * 513, b""),
        ("set", "k", "text"),
    ),
    *(("get", "k", "soon"), ("get", "k", "x" * 100_000), ("get", "k", -1), ("get", "k", float("nan"))),
    *(("exchange", "s", 0, readers, b"", [], 0) for readers in (1, [[]], ["x"])),
    *(("exchange", "s", 0, [2], b"", senders, 0) for senders in (1, [[]], ["x"])),
    *(("exchange", "k" * 513, 0, [2], b"", [], 0), ("exchange", "s", 0, [2], b"", [], "soon")),
    *(("taken", "s", 0, 1), ("add", "k", 2**64)),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: repr(request)[:30])
def test_a_request_that_cannot_be_is_refused_in_few_words_and_changes_nothing(
    store: Store, request_: Any
) -> None:
    status, text = store.answer(1, request_)
    assert status == "refused" and len(text) < 500
    assert store.num_entries == 0
