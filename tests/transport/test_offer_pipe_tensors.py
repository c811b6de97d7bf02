"""The base of pipes that offer messages, with a transport that moves them in pieces inside of its offers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from kvplug import PeerGoneError, TimeoutError
from kvplug.net.wire import memory_of
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.transport import (
    Connection,
    Credentials,
    Deadline,
    DuplexEndpoint,
    OfferPipe,
    PipeEndpoint,
    TensorMismatchError,
    WireError,
)
from kvplug_testing import simulated
from kvplug_testing.comparison import assert_same
from kvplug_testing.pairs import PipePairs
from kvplug_testing.waits import Call, until

PIECE = 1000
PATIENCE_S = 20.0
PREFIX = tensor_prefix(torch.uint8, torch.Size((8,)), 8)


class InlinePipe(OfferPipe):
    NAME = "inline"
    MAX_OFFERS = 8
    pieces_left = 10**9
    """So many pieces are moved before a call runs out of time."""

    def __init__(self, join: OfferPipe.Join, settings: OfferPipe.Settings) -> None:
        super().__init__(join, settings)
        self.may_handle = threading.Event()
        self.may_handle.set()
        self.num_handled = self.most_in_a_row = self._in_a_row = 0
        self._start()

    def handle(self, value: Any) -> None:
        """As if the peer had sent it."""
        self._handle(value)

    def _handle(self, value: Any) -> None:
        assert self.may_handle.wait(PATIENCE_S)
        super()._handle(value)
        self._in_a_row += 1
        self.num_handled += 1

    def _step(self) -> bool:
        self.most_in_a_row, self._in_a_row = max(self.most_in_a_row, self._in_a_row), 0
        return super()._step()

    def _next_offer(self, message: OfferPipe.SentMessage) -> OfferPipe.Offer:
        nbytes = min(PIECE, message.content.nbytes - message.num_offered)
        return OfferPipe.Offer(message, nbytes, message.content.ready, message.num_offered)

    def _place_of(self, offer: OfferPipe.Offer) -> bytes:
        whole = b"".join(bytes(memory_of(each.cpu())) for each in offer.message.content.tensors)
        return whole[offer.place : offer.place + offer.nbytes]

    def _read_place(self, meta: Any, nbytes: int, place: Any) -> bytes:
        if not isinstance(place, bytes) or len(place) != nbytes:
            raise WireError("other bytes than it says")
        return place

    def _survives(self, offer: OfferPipe.ComingOffer) -> bool:
        return True

    def _move(self, message: Any, memory: Any, deadline: Deadline, *, in_place: bool) -> bool:
        while message.got < message.nbytes:
            offer = self._coming.oldest(deadline)
            if offer is None or not self.pieces_left:
                return False
            self.pieces_left -= 1
            piece = torch.frombuffer(bytearray(offer.place), dtype=torch.uint8)
            with self._copying(*memory):
                self.bytes_of(memory[0])[message.got : message.got + offer.nbytes].copy_(piece)
            message.got += offer.nbytes
            self._take()
        return True


class InlineEndpoint(DuplexEndpoint):
    PURPOSE = "inline"

    def __init__(self, context: PipeEndpoint.Context) -> None:
        super().__init__(context)
        self.may_accept = threading.Event()
        self.may_accept.set()

    class CONTACT(DuplexEndpoint.Contact):
        TRANSPORT = "inline"
        UNREACHABLE = "elsewhere"

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> InlinePipe:
        device = OfferPipe.Device(self._context.device)
        settings = OfferPipe.Settings.of(self._context, device=device, max_in_flight_bytes=1 << 20)
        with OfferPipe.Join.over(connection, 10.0, deadline) as join:
            join.send(True)
            assert not accepted or self.may_accept.wait(PATIENCE_S)
            assert join.receive() is True
            return InlinePipe(join, settings)


@pytest.fixture
def pairs() -> Iterator[PipePairs]:
    with PipePairs() as made:
        yield made


def endpoint(device: str = "cpu") -> InlineEndpoint:
    return InlineEndpoint(
        PipeEndpoint.Context(options=None, credentials=Credentials(), device=device, timeout_s=PATIENCE_S)
    )


def test_a_message_is_resumed_in_other_memory_and_refused_memory_changes_nothing(pairs: PipePairs) -> None:
    one, other = pairs.local(endpoint())
    message = torch.randint(0, 256, (20 * PIECE + 7,), dtype=torch.uint8)
    one.send_tensor(message)
    out = torch.zeros_like(message)
    other.pieces_left = 3
    with pytest.raises(TimeoutError, match=f"{3 * PIECE} of {len(message)} bytes"):
        other.recv_tensor(out, timeout=0.2)
    out.fill_(9)  # the caller's again
    with pytest.raises(TensorMismatchError):
        other.recv_tensor(torch.zeros(5), timeout=0.2)
    other.pieces_left = 2
    with pytest.raises(TimeoutError, match=f"{5 * PIECE} of"):
        other.recv_tensor(torch.zeros_like(message), timeout=0.2)
    assert bool((out == 9).all())
    other.pieces_left = 10**9
    assert other.recv_tensor(out) is out
    assert_same(message, out)


def test_a_message_that_comes_together_with_the_last_value_of_the_join_is_received(pairs: PipePairs) -> None:
    late = endpoint()
    late.may_accept.clear()
    listener = late.listen()
    pairs.callback(listener.close)
    one = late.connect(listener.contact)
    pairs.callback(one.abort)
    one.send_tensor(torch.arange(5))
    late.may_accept.set()
    other = listener.accept()
    pairs.callback(other.abort)
    assert other.recv_tensor(timeout=5).tolist() == [0, 1, 2, 3, 4]


def test_a_peer_that_sends_much_does_not_keep_the_worker_from_its_other_work(pairs: PipePairs) -> None:
    one, other = pairs.local(endpoint())
    other.may_handle.clear()
    for _ in range(200):
        one.channel.send(["heartbeat"])
    other.may_handle.set()
    until(lambda: other.num_handled >= 200, what="the last value")
    assert other.most_in_a_row <= 32


def test_whole_messages_outlive_a_goodbye_and_parts_of_one_do_not(pairs: PipePairs) -> None:
    one, other = pairs.local(endpoint())
    one.send_tensor(torch.arange(5))
    one.send_tensor(None)
    one.channel.send(["offer", PREFIX, 4, b"half"])
    one.channel.send(["goodbye", False])
    assert other.recv_tensor().tolist() == [0, 1, 2, 3, 4]
    assert other.recv_tensor() is None
    with pytest.raises(PeerGoneError, match="before its messages were taken") as raised:
        other.recv_tensor()
    assert not raised.value.closed


def test_no_caller_waits_for_a_late_kernel_and_messages_keep_their_order(pairs: PipePairs) -> None:
    simulated.enable()
    one, other = pairs.local(endpoint("simulated"))
    source, first, second = (torch.full((3000,), n).to("simulated") for n in range(3))
    with simulated.stalled():
        source.copy_(first)
        transfers = [one.send_tensor(each) for each in (source, None)]
        with pytest.raises(TimeoutError, match="no message has arrived"):
            other.recv_tensor(timeout=0.2)
        assert not any(each.done() for each in transfers)
        assert Call(lambda: one.close(timeout=0)).result() is None
    with pytest.raises(PeerGoneError):
        other.recv_tensor()
    one, other = pairs.local(endpoint("simulated"))
    with simulated.stalled():
        source.copy_(second)
        transfers = [one.send_tensor(each) for each in (source, None)]
    assert bool((other.recv_tensor().cpu() == 2).all())
    assert other.recv_tensor() is None
    for each in transfers:
        each.wait(PATIENCE_S)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.binary(max_size=8) | st.sampled_from([NONE, PREFIX]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
KINDS = st.sampled_from(["offer", "taken", "heartbeat", "clear"])


def test_any_value_of_a_peer_is_handled_or_is_a_wire_error(pairs: PipePairs) -> None:
    pipe, _ = pairs.local(endpoint())

    @given(PLAIN | st.lists(PLAIN, max_size=4).flatmap(lambda rest: KINDS.map(lambda kind: [kind, *rest])))
    def handle(value: Any) -> None:
        try:
            pipe.handle(value)
        except WireError:
            return

    handle()
