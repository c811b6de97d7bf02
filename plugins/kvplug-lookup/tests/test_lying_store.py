"""A store that has proved its identity and lies, and an end of the same kind that lies to a store."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from kvplug import CapacityError, PeerGoneError, TimeoutError, TransportError
from kvplug.net.wire import TensorMeta
from kvplug.transport import WireError
from kvplug_lookup.buffer import server
from kvplug_lookup.buffer.messages import (
    Coming,
    Failed,
    Granted,
    Matched,
    Read,
    Take,
    key_to_bytes,
    pack,
    unpack,
)
from kvplug_lookup.buffer.reach import ReachingEnd
from lookup_thread_pipes import thread_pipes

ASKED = (1, 2, 3)
META = TensorMeta("float32", (2, 3, 2, 4))
TB = 1 << 40


def tokens(*ids: int) -> bytes:
    return key_to_bytes(np.array(ids, np.int64))


def coming(call: int, ids: tuple[int, ...] = ASKED, **changed: Any) -> Coming:
    meta = TensorMeta("float32", (2, len(ids), 2, 4))
    made = Coming(call, 7, b"", tokens(*ids), b"\1" * len(ids), {}, meta, None, None)
    return attrs.evolve(made, **changed)


class LyingStore:
    """The other end of a reaching end: a test says what it answers to the next request."""

    def __init__(self, max_message_bytes: int | None = None) -> None:
        ours_signal, self.signal = thread_pipes()
        ours_data, self.data = thread_pipes()
        self.end = ReachingEnd(ours_signal, ours_data, timeout_s=5, max_message_bytes=max_message_bytes)

    def hear(self) -> Any:
        return unpack(self.signal.recv_tensor(timeout=5))

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.signal.send_tensor(pack(message), timeout=5)

    def send(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            self.data.send_tensor(tensor, timeout=5)

    def close(self) -> None:
        self.end.abort()
        self.signal.abort()
        self.data.abort()


@pytest.fixture
def store() -> Any:
    made = LyingStore()
    yield made
    made.close()


def asked(store: LyingStore, started: Any, verb: str, *args: Any, **given: Any) -> tuple[Any, int]:
    """A call under way, and its number."""
    call = started(getattr(store.end, verb), *args, **given)
    return call, store.hear().call


def layers(meta: TensorMeta = META) -> list[torch.Tensor]:
    return [torch.full(meta.shape[1:], float(layer)) for layer in range(meta.shape[0])]


# -- an entry that was not asked for ------------------------------------------------------------


@pytest.mark.parametrize("verb", ["select", "drop_select"])
@pytest.mark.parametrize(
    "lie",
    [
        {"ids": (4, 5, 6)},
        {"ids": (1, 2, 4)},
        {"ids": (1, 2, 4, 3)},
        {"extra": b"of another adapter"},
        {"roi": b"\0\0\0"},
        {"roi": b"\1\0\1"},  # tokens 1, 3
    ],
)
def test_an_entry_of_other_tokens_is_never_handed_out(
    store: LyingStore, started: Any, verb: str, lie: dict[str, Any]
) -> None:
    given = {"min_tokens": 3} if verb == "select" else {}
    call, number = asked(store, started, verb, list(ASKED), timeout=5, **given)
    store.send(*layers())
    store.say(coming(number, **lie))
    with pytest.raises(WireError, match="other tokens"):
        call.result()
    assert store.end.is_lost  # so that the store has the entry back


@pytest.mark.parametrize(
    ("verb", "given", "ids"),
    [
        ("select", {"min_tokens": 2}, (1, 2, 9)),
        ("select", {"min_tokens": 2}, (1, 2)),
        ("drop_select", {}, (1, 2)),
        ("drop_select", {}, (1, 2, 3, 4)),
    ],
)
def test_an_entry_that_the_law_allows_is_handed_out(
    store: LyingStore, started: Any, verb: str, given: dict[str, Any], ids: tuple[int, ...]
) -> None:
    call, number = asked(store, started, verb, list(ASKED), timeout=5, **given)
    store.say(coming(number, ids))
    store.send(*layers(TensorMeta("float32", (2, len(ids), 2, 4))))
    if verb == "drop_select":
        store.hear()
        store.say(Granted(number, True))
    assert call.result().tokens.tolist() == list(ids)


def test_a_match_is_never_longer_than_the_query(store: LyingStore, started: Any) -> None:
    call, number = asked(store, started, "match", list(ASKED))
    store.say(Matched(number, 4))
    with pytest.raises(WireError, match="4 of 3 tokens"):
        call.result()


# -- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(
    "meta",
    [
        TensorMeta("float32", (4, 3, TB)),
        TensorMeta("uint8", (1, 3, 1 << 50)),
        TensorMeta("float64", (2, 3, 1 << 55)),
    ],
)
def test_memory_is_not_asked_for_before_the_size_is_checked(
    store: LyingStore, started: Any, meta: TensorMeta, with_sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **given: taken.append(size) or empty(size, **given))
    given = {"sink": Sink()} if with_sink else {}
    call, number = asked(store, started, "select", list(ASKED), timeout=5, **given)
    store.say(coming(number, key=meta))
    with pytest.raises(CapacityError, match="this process can have at most"):
        call.result()
    assert not taken


class Sink:
    def begin(self, header: Any) -> None:
        pass

    def layer(self, index: int, key: Any, value: Any) -> None:
        pass


LARGE = attrs.evolve(META, shape=(3, *META.shape[1:]))


@pytest.mark.parametrize("parts", [(LARGE, None), (META, META)])  # the second are too large together
def test_an_entry_beyond_the_configs_limit_is_refused_and_the_next_one_comes(
    started: Any, parts: tuple[TensorMeta, TensorMeta | None]
) -> None:
    store = LyingStore(max_message_bytes=META.nbytes)
    try:
        call, number = asked(store, started, "select", list(ASKED), timeout=5)
        store.say(coming(number, key=parts[0], value=parts[1]))
        with pytest.raises(CapacityError, match=f"at most {META.nbytes}"):
            call.result()
        store.hear()  # Cancel
        for meta in parts:
            store.send(*([] if meta is None else layers(meta)))
        call, number = asked(store, started, "select", list(ASKED), timeout=5)
        store.say(coming(number))
        store.send(*layers())
        assert call.result().key.shape == META.shape
    finally:
        store.close()


@pytest.mark.parametrize(
    "lie",
    [
        {"key": TensorMeta("float32", (2, 4, 1))},  # tokens
        {"key": TensorMeta("float32", (6,))},
        {"value": TensorMeta("float32", (3, 3, 2, 4))},  # layers
        {"key": TensorMeta("uint8", (1 << 40, 3, 0))},  # layers without end
        {"roi": b"\1\1"},
        {"roi": b"\1\2\1"},
        {"tokens": b"12345678" * 2 + b"1234567"},
        {"entry_id": 2**63 - 1},
        {"entry_id": -1},
    ],
)
def test_an_announcement_that_contradicts_itself_is_none(lie: dict[str, Any]) -> None:
    with pytest.raises((WireError, ValueError)):
        unpack(pack(coming(1, **lie)))


@pytest.mark.parametrize(
    "part",
    [
        ["float32", [2, 3, -1]],
        ["float32", [2, 3, 2**62]],
        ["float32", [2, 3] + [1] * 80],
        ["float32", [2, 3.5]],
        ["float32", "23"],
        ["floaty", [2, 3]],
        ["nn", [2, 3]],  # torch has the name, and it is no dtype
        ["\x1b[31m" * 9999, [2, 3]],
        [7, 8, 9],
        "float32",
    ],
)
def test_parts_that_cannot_be_are_a_wire_error_in_one_short_line(part: Any) -> None:
    from kvplug.net.wire import encode

    plain = ["Coming", 1, 7, b"", tokens(*ASKED), b"\1\1\1", {}, part, None, None]
    data = torch.frombuffer(bytearray(encode(plain)), dtype=torch.uint8)
    with pytest.raises(WireError) as caught:
        unpack(data)
    assert len(str(caught.value)) < 1200 and str(caught.value).isprintable()


def test_a_tensor_of_another_shape_than_announced_is_not_received(store: LyingStore, started: Any) -> None:
    call, number = asked(store, started, "select", list(ASKED), timeout=5)
    store.say(coming(number))
    store.send(torch.zeros(5, 5))
    with pytest.raises(WireError, match="another shape or dtype"):
        call.result()
    assert store.end.is_lost


def test_a_signal_larger_than_any_message_is_not_received(store: LyingStore) -> None:
    store.signal.send_tensor(torch.zeros((16 << 20) + 1, dtype=torch.uint8))
    with pytest.raises(CapacityError, match="has 16777217 bytes"):
        store.end.match([1])


# -- what was not asked for ----------------------------------------------------------------------


def test_announcements_that_were_not_asked_for_make_no_threads_and_end_the_connection(
    store: LyingStore, eventually: Any
) -> None:
    before = threading.active_count()
    for number in range(1500):
        try:
            store.say(coming(number + 10))
        except PeerGoneError:
            break
    eventually(lambda: store.end.is_lost)
    assert threading.active_count() <= before
    with pytest.raises(WireError, match="not asked for"):
        store.end.match([1])


def test_the_same_answer_twice_ends_the_connection(store: LyingStore, started: Any) -> None:
    call, number = asked(store, started, "drop_select", list(ASKED), timeout=5)
    store.say(coming(number), coming(number))
    with pytest.raises(WireError, match="answers nothing"):
        call.result()


@pytest.mark.parametrize("answer", [Matched(1, 2), Granted(1, True)])
def test_an_answer_of_another_kind_ends_the_connection(store: LyingStore, started: Any, answer: Any) -> None:
    call, _ = asked(store, started, "select", list(ASKED), timeout=5)
    store.say(answer)
    with pytest.raises(WireError, match="answers nothing"):
        call.result()


def test_entries_of_calls_that_gave_up_are_drained_by_one_thread(
    store: LyingStore, started: Any, eventually: Any
) -> None:
    numbers = []
    for _ in range(40):
        call, number = asked(store, started, "select", list(ASKED), timeout=0.05)
        with pytest.raises(TimeoutError):
            call.result()
        store.hear()  # Cancel
        numbers.append(number)
    before = threading.active_count()
    store.say(*(coming(number) for number in numbers))
    eventually(lambda: not store.end._left)
    assert threading.active_count() <= before + 1
    call, number = asked(store, started, "select", list(ASKED), timeout=5)
    for each in numbers:
        store.send(*([*layers()[:1], None] if each % 2 else layers()))
    eventually(lambda: not store.end._deliveries._queue)
    store.say(coming(number))
    store.send(*layers())
    assert call.result().key[1, 0, 0, 0] == 1


# -- text ---------------------------------------------------------------------------------------


def test_a_stores_error_text_is_one_printable_line(store: LyingStore, started: Any) -> None:
    call, number = asked(store, started, "match", list(ASKED))
    store.say(Failed(number, "No\nSuchError", "all is well\n\x1b[2Jroot logged in\n" + "x" * 10_000))
    with pytest.raises(TransportError) as caught:
        call.result()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1200


# -- lies to a store ----------------------------------------------------------------------------


def session(joined: Any) -> tuple[Any, Any, Any]:
    store = joined.store()
    signal, theirs_signal = thread_pipes()
    data, theirs_data = thread_pipes()
    store.attach(theirs_signal, theirs_data)
    return store, signal, data


def test_a_store_serves_no_more_calls_of_one_end_than_a_bound(joined: Any, entry: Any) -> None:
    store, signal, data = session(joined)
    good = joined.reach(store)
    for number in range(server._MAX_CALLS):
        signal.send_tensor(pack(Take(number, tokens(9), b"", None)), timeout=5)
    with pytest.raises(TimeoutError):
        signal.recv_tensor(timeout=0.2)
    signal.send_tensor(pack(Take(server._MAX_CALLS, tokens(9), b"", None)), timeout=5)
    with pytest.raises(PeerGoneError):
        signal.recv_tensor(timeout=5)
    store.insert(*entry([1, 2]))
    assert good.match([1, 2]) == 2
    for pipe in (signal, data):
        pipe.abort()


@pytest.mark.parametrize(
    "lie",
    [
        Read(1, b"1234567", b"", 1, 1.0),
        Take(1, b"1234567", b"", None),
        Coming(1, 7, b"", b"", b"", {}, None, None, None),
        Granted(1, True),
    ],
)
def test_a_request_that_cannot_be_ends_that_session_only(joined: Any, entry: Any, lie: Any) -> None:
    store, signal, _ = session(joined)
    good = joined.reach(store)
    signal.send_tensor(pack(lie))
    with pytest.raises(PeerGoneError):
        signal.recv_tensor(timeout=5)
    store.insert(*entry([1, 2]))
    assert good.match([1, 2]) == 2


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 2**63])
def test_a_time_without_end_is_no_error(joined: Any, entry: Any, timeout: float, eventually: Any) -> None:
    store, signal, data = session(joined)
    store.insert(*entry([1, 2]))
    signal.send_tensor(pack(Read(1, tokens(1, 2), b"", 1, timeout)))
    assert isinstance(unpack(signal.recv_tensor(timeout=5)), Coming)
    assert data.recv_tensor(timeout=5) is not None
