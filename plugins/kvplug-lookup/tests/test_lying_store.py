"""A store that has proved its identity and sends wrong messages, and an end that sends them to a store."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from kvplug import CapacityError, ClosedError, PeerGoneError, TimeoutError, TransportError
from kvplug.net.wire import TensorMeta, encode
from kvplug.transport import WireError
from kvplug_lookup.buffer import reach, session
from kvplug_lookup.buffer.entry import Description, Query
from kvplug_lookup.buffer.messages import (
    Cancel,
    Done,
    Failed,
    Find,
    Found,
    Granted,
    Match,
    Send,
    pack,
    unpack,
)
from kvplug_testing.pairs import PipeAround
from kvplug_testing.waits import Call, until

ASKED = (1, 2, 3)
META = TensorMeta("float32", (2, 3, 2, 4))


def tokens(*ids: int) -> bytes:
    return np.array(ids, "<i8").tobytes()


def take(call: int, *ids: int, timeout: float | None = None) -> Find:
    return Find(call, Query(tokens(*ids), b""), timeout)


def found(call: int, ids: tuple[int, ...] = ASKED, *, entry_id: int = 7, **changed: Any) -> Found:
    meta = TensorMeta("float32", (2, len(ids), 2, 4))
    entry = Description(tokens(*ids), b"\1" * len(ids), b"", encode({}), meta, None, None)
    return Found(call, entry_id, attrs.evolve(entry, **changed))


class Sink:
    def begin(self, header: Any) -> None:
        pass

    def layer(self, index: int, key: Any, value: Any) -> None:
        pass


class LyingStore:
    """The other end of a reaching end. The test chooses its answers."""

    def __init__(self, joined: Any, max_message_bytes: int | None = None) -> None:
        ours_signal, self.signal = joined.pipes()
        ours_data, self.data = joined.pipes()
        self.end = reach.ReachingEnd(ours_signal, ours_data, timeout_s=5, max_message_bytes=max_message_bytes)
        joined.callback(self.end.abort)

    def asked(self, verb: str, **given: Any) -> tuple[Call, int]:
        """A call under way for the tokens ASKED, and its number."""
        call = Call(lambda: getattr(self.end, verb)(list(ASKED), **given))
        return call, self.receive().call

    def receive(self) -> Any:
        return unpack(self.signal.recv_tensor(timeout=5))

    def answer(self, *messages: Any) -> None:
        for message in messages:
            self.signal.send_tensor(pack(message), timeout=5)

    def send(self, *tensors: torch.Tensor | None) -> list[Any]:
        return [self.data.send_tensor(tensor, timeout=5) for tensor in tensors]

    def serve(self, number: int) -> None:
        """Announce an entry, and send it when it is asked for."""
        self.answer(found(number))
        assert self.receive() == Send(number)
        self.send(*layers())


@pytest.fixture
def store(joined: Any) -> LyingStore:
    return LyingStore(joined)


def layers(meta: TensorMeta = META) -> list[torch.Tensor]:
    return [torch.full(meta.shape[1:], float(layer)) for layer in range(meta.shape[0])]


# -- an entry that was not asked for ------------------------------------------------------------


@pytest.mark.parametrize("verb", ["select", "drop_select"])
@pytest.mark.parametrize(
    "lie",
    [
        {"ids": (1, 2, 4)},
        {"extra": b"of another adapter"},
        {"roi": b"\0\0\0"},
        {"roi": b"\1\0\1"},  # tokens 1, 3
    ],
)
def test_an_entry_with_other_tokens_is_never_returned(
    store: LyingStore, verb: str, lie: dict[str, Any]
) -> None:
    given = {"min_tokens": 3} if verb == "select" else {}
    call, number = store.asked(verb, timeout=5, **given)
    store.answer(found(number, **lie))
    assert "other tokens" in str(call.raised(WireError))
    assert store.end.is_lost  # so that the store has the entry back


def test_an_announcement_with_wrong_metadata_ends_the_connection(store: LyingStore) -> None:
    call, number = store.asked("select", timeout=5)
    store.answer(found(number, metadata=encode([1])))
    assert "wrong metadata" in str(call.raised(WireError))
    assert store.end.is_lost


# -- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_sink", [False, True])
def test_memory_is_only_allocated_after_the_size_is_checked(
    store: LyingStore, with_sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **given: taken.append(size) or empty(size, **given))
    given = {"sink": Sink()} if with_sink else {}
    call, number = store.asked("select", timeout=5, **given)
    store.answer(found(number, key=TensorMeta("float32", (4, 3, 1 << 40))))
    assert "this process can have at most" in str(call.raised(CapacityError))
    assert max(map(np.prod, taken)) < 1000, "more than the store's messages"


LARGE = attrs.evolve(META, shape=(3, *META.shape[1:]))


@pytest.mark.parametrize("parts", [(LARGE, None), (META, META)])  # the second are too large together
def test_an_entry_beyond_the_configs_limit_is_refused_and_the_next_one_comes(
    joined: Any, parts: tuple[TensorMeta, TensorMeta | None]
) -> None:
    store = LyingStore(joined, max_message_bytes=META.nbytes)
    call, number = store.asked("select", timeout=5)
    store.answer(found(number, key=parts[0], value=parts[1]))
    assert f"at most {META.nbytes}" in str(call.raised(CapacityError))
    assert store.receive() == Cancel(number)
    call, number = store.asked("select", timeout=5)
    store.serve(number)
    assert call.result().key.shape == META.shape


@pytest.mark.parametrize(
    "lie",
    [
        {"key": TensorMeta("float32", (2, 4, 1))},  # tokens
        {"value": TensorMeta("float32", (3, 3, 2, 4))},  # layers
        {"key": TensorMeta("uint8", (1 << 40, 3, 0))},  # layers without end
        {"roi": b"\1\1"},
        {"tokens": b"12345678" * 2 + b"1234567"},
        {"entry_id": -1},
    ],
)
def test_an_announcement_that_contradicts_itself_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises((WireError, ValueError)):
        unpack(pack(found(1, **lie)))


def test_a_signal_larger_than_any_message_is_not_received(store: LyingStore) -> None:
    store.signal.send_tensor(torch.zeros((16 << 20) + 1, dtype=torch.uint8))
    with pytest.raises(CapacityError, match="has 16777217 bytes"):
        store.end.match([1])


# -- messages without a request -----------------------------------------------------------------


def test_announcements_that_were_not_requested_start_no_threads_and_end_the_connection(
    store: LyingStore,
) -> None:
    before = threading.active_count()
    for number in range(1500):
        try:
            store.answer(found(number + 10))
        except PeerGoneError:
            break
    until(lambda: store.end.is_lost)
    assert threading.active_count() <= before
    with pytest.raises(WireError, match="not asked for"):
        store.end.match([1])


@pytest.mark.parametrize("rest", [layers()[1:], [None]])
def test_the_rest_of_an_entry_whose_call_gave_up_is_dropped_by_one_thread(
    store: LyingStore, rest: list[torch.Tensor | None]
) -> None:
    before = threading.active_count()
    call, number = store.asked("select", timeout=0.3)
    store.answer(found(number))
    assert store.receive() == Send(number)
    store.send(*layers()[:1])
    call.raised(TimeoutError)
    assert store.receive() == Cancel(number)
    for _ in range(20):
        call, waiting = store.asked("select", timeout=0.02)
        store.answer(found(waiting))
        call.raised(TimeoutError)
        assert store.receive() == Cancel(waiting), "the tensors of the first entry have not all arrived"
        store.answer(Failed(waiting, "TimeoutError", "too late"))
    assert threading.active_count() <= before + 1
    transfers = store.send(*rest)
    until(lambda: all(each.done() for each in transfers))
    call, number = store.asked("select", timeout=5)
    store.serve(number)
    assert call.result().key[1, 0, 0, 0] == 1


def test_a_stores_error_text_is_one_printable_line(store: LyingStore) -> None:
    call, number = store.asked("match")
    store.answer(Failed(number, "No\nSuchError", "all is well\n\x1b[2Jroot logged in\n" + "x" * 10_000))
    said = str(call.raised(TransportError))
    assert said.isprintable() and len(said) < 1200


@pytest.mark.parametrize(("answers", "says"), [([], "grant of an entry"), ([False], "back in the store")])
def test_a_caller_gets_an_entry_only_if_the_store_confirms_it(
    store: LyingStore, monkeypatch: pytest.MonkeyPatch, answers: list[bool], says: str
) -> None:
    monkeypatch.setattr(reach, "_SETTLE_S", 0.05)
    call, number = store.asked("drop_select", timeout=0.3)
    store.serve(number)
    assert store.receive() == Done(number)
    store.answer(*(Granted(number, is_yours) for is_yours in answers))
    assert says in str(call.raised(TimeoutError))


class StoppedAfterDone(PipeAround):
    """The signal pipe of a process that is stopped when it has received an entry, until its time is up."""

    resumed = threading.Event()

    def _send_tensor(self, tensor: Any, timeout: Any) -> Any:
        is_done = isinstance(unpack(tensor), Done)
        if is_done:
            self.resumed.clear()
        transfer = super()._send_tensor(tensor, timeout)
        if is_done:
            time.sleep(0.8)
            self.resumed.set()
        return transfer

    def _receive_tensor(self, out: Any, timeout: Any) -> Any:
        received = super()._receive_tensor(out, timeout)
        if isinstance(unpack(received), Granted):
            self.resumed.wait()
            time.sleep(0.05)
        return received


def test_an_entry_that_was_granted_to_a_stopped_process_is_not_lost(
    joined: Any, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_SETTLE_S", 0.4)
    store = joined.store()
    signal, data = joined.served(store)
    end = reach.ReachingEnd(StoppedAfterDone(signal), data)
    joined.callback(end.abort)
    store.insert(*entry([1, 2]))
    assert end.drop_select([1, 2], timeout=0.3).tokens.tolist() == [1, 2]


# -- lies to a store ----------------------------------------------------------------------------


def test_a_store_serves_no_more_calls_of_one_end_than_a_bound(joined: Any, entry: Any) -> None:
    store = joined.store()
    signal, _ = joined.served(store)
    good = joined.reach(store)
    for number in range(session.MAX_CALLS):
        signal.send_tensor(pack(take(number, 9)), timeout=5)
    with pytest.raises(TimeoutError):
        signal.recv_tensor(timeout=0.2)
    signal.send_tensor(pack(take(session.MAX_CALLS, 9)), timeout=5)
    with pytest.raises(PeerGoneError):
        signal.recv_tensor(timeout=5)
    store.insert(*entry([1, 2]))
    assert good.match([1, 2]) == 2


def test_calls_of_an_end_that_does_not_read_its_answers_expire(
    joined: Any, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_GRACE_S", 0.05)
    store = joined.store()
    signal, _ = joined.served(store)
    store.insert(*entry([1, 2]))
    signal.send_tensor(pack(take(1, 1, 2, timeout=0.2)))
    for number in range(2, 6):  # more bytes of answers than the pipe holds
        store.insert(*entry([number]), metadata={"large": bytes(1 << 19)})
        signal.send_tensor(pack(take(number, number)))
    signal.send_tensor(pack(Match(6, Query(tokens(1), b""))))
    until(lambda: store.match([1, 2]) == 2, what="that the entry of the first call is back")
    assert {unpack(signal.recv_tensor(timeout=5)).call for _ in range(6)} == {1, 2, 3, 4, 5, 6}


def test_the_number_of_calls_cancelled_while_an_entry_is_sent_is_limited(joined: Any, entry: Any) -> None:
    store = joined.store()
    signal, data = joined.served(store, 1)
    store.insert(*entry([1, 2]))
    numbers = itertools.count(1)

    def ask() -> int:
        number = next(numbers)
        signal.send_tensor(pack(Find(number, Query(tokens(1), b"", 1), None)), timeout=5)
        return number

    signal.send_tensor(pack(Send(ask())))
    assert unpack(signal.recv_tensor(timeout=5)).call == 1
    for _ in range(3 * session.MAX_CALLS):
        signal.send_tensor(pack(Cancel(ask())), timeout=5)
    assert unpack(signal.recv_tensor(timeout=5)).error == "TimeoutError"

    def is_answered() -> bool:
        number = ask()
        while (answer := unpack(signal.recv_tensor(timeout=5))).call < number:
            pass
        return isinstance(answer, Found)

    for _ in range(5):  # layers of key and value, and hidden states
        assert data.recv_tensor(timeout=5) is not None
    until(is_answered)


@pytest.mark.parametrize(
    "lie",
    [
        None,
        torch.zeros(3),
        torch.tensor([*b"garbage"], dtype=torch.uint8),
        torch.tensor([*b"\x91\xa5Match"], dtype=torch.uint8),
        torch.tensor([*encode(["Find", {"call": 1, "query": {"ids": b"1234567", "extra": b""}}])]).byte(),
        pack(Granted(1, True)),
        pack(Send(1)),
        pack(Done(1)),
    ],
)
def test_a_malformed_request_ends_only_its_session(
    joined: Any, entry: Any, lie: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = joined.store()
    signal, _ = joined.served(store)
    good = joined.reach(store)
    signal.send_tensor(lie)
    with pytest.raises(PeerGoneError):
        signal.recv_tensor(timeout=5)
    assert "no longer served" in caplog.text
    store.insert(*entry([1, 2]))
    assert good.match([1, 2]) == 2


def test_an_entry_not_confirmed_in_time_is_available_again_and_a_late_confirmation_is_refused(
    joined: Any, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_GRACE_S", 0.05)
    store = joined.store()
    signal, data = joined.served(store)
    store.insert(*entry([1, 2]))
    signal.send_tensor(pack(take(1, 1, 2, timeout=0.2)))
    assert unpack(signal.recv_tensor(timeout=5)).call == 1
    assert store.match([1, 2]) == 0
    until(lambda: store.match([1, 2]) == 2)
    memory = weakref.ref(store.drop_select([1, 2]).key)
    until(lambda: memory() is None, what="that a call whose time is over keeps no entry in memory")
    signal.send_tensor(pack(Send(1)))
    assert data.recv_tensor(timeout=5) is None
    signal.send_tensor(pack(Done(1)))
    assert unpack(signal.recv_tensor(timeout=5)) == Granted(1, False)


def test_an_entry_is_taken_as_a_copy_while_an_abandoned_transfer_reads_it(
    joined: Any, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that was stopped in the middle of a tensor would receive what its new owner writes."""
    monkeypatch.setattr(session, "_GRACE_S", 0.05)
    store = joined.store()
    signal, data = joined.served(store)
    parts = entry([1, 2])
    store.insert(*parts)
    signal.send_tensor(pack(Find(1, Query(tokens(1, 2), b"", 1), 1.0)))
    assert unpack(signal.recv_tensor(timeout=5)).call == 1
    signal.send_tensor(pack(Send(1)))
    taken = store.drop_select([1, 2])
    taken.key.fill_(-1)
    assert torch.equal(data.recv_tensor(timeout=5), parts[2][0])


def test_the_peer_of_pipes_attached_to_a_closed_store_gets_peer_gone(joined: Any) -> None:
    store = joined.store()
    store.abort()
    (signal, their_signal), (data, their_data) = joined.pipes(), joined.pipes()
    end = reach.ReachingEnd(signal, data)
    joined.callback(end.abort)
    with pytest.raises(ClosedError):
        store.attach(their_signal, their_data)
    with pytest.raises(PeerGoneError):
        end.drop_select([1], timeout=5)


class Interrupted(PipeAround):
    """Ctrl-C comes just after a tensor was received."""

    def _receive_tensor(self, out: Any, timeout: Any) -> Any:
        super()._receive_tensor(out, timeout)
        raise KeyboardInterrupt


def test_an_end_that_was_interrupted_during_a_receive_raises_from_then_on(joined: Any, entry: Any) -> None:
    store = joined.store()
    signal, data = joined.served(store)
    end = reach.ReachingEnd(signal, Interrupted(data), timeout_s=5)
    joined.callback(end.abort)
    store.insert(*entry([1, 2]))
    with pytest.raises(KeyboardInterrupt):
        end.select([1], sink=Sink())
    with pytest.raises(TransportError, match="interrupted"):
        end.select([1], sink=Sink())


def test_a_call_whose_request_was_never_sent_can_be_cancelled(joined: Any, entry: Any) -> None:
    """Its request did not fit into the signal pipe, or into a message."""
    store = joined.store()
    end = joined.reach(store)
    with pytest.raises(CapacityError):
        end.select(torch.zeros(3 << 20, dtype=torch.int64))
    store.insert(*entry([1, 2]))
    assert end.match([1, 2]) == 2


def test_an_entry_is_sent_once_and_only_if_there_is_one(joined: Any, entry: Any) -> None:
    store = joined.store()
    for is_held in (False, True):
        signal, _ = joined.served(store)
        if is_held:
            store.insert(*entry([1, 2]))
        signal.send_tensor(pack(take(1, 1, 2)))
        if is_held:
            assert unpack(signal.recv_tensor(timeout=5)).call == 1
            signal.send_tensor(pack(Send(1)))
        signal.send_tensor(pack(Send(1)))
        with pytest.raises(PeerGoneError):
            signal.recv_tensor(timeout=5)
        until(lambda: store.match([1, 2]) == 2 * is_held)  # noqa: B023
