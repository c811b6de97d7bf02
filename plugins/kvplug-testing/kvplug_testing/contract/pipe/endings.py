"""How a pipe ends: closing and aborting it (law ALL-1), and the effect on the other end (law ALL-2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.transport import Pipe
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import LIMIT, MIB, PipeSuite, fill, received, sent
from kvplug_testing.waits import Call, raises, until

ENDS = ("close", "abort")
_LONG_S = 600.0
"""Timeout of calls that another event must end first."""


def _end(pipe: Pipe, how: str) -> None:
    """End the pipe; ``close`` does not wait for unsent messages."""
    Call(pipe.abort if how == "abort" else lambda: pipe.close(timeout=0.1)).result()


class Endings(PipeSuite):
    """Ending a pipe with both ends in this process."""

    # -- this end ------------------------------------------------------------------------------

    @law("ALL-1")
    @pytest.mark.parametrize("how", ENDS)
    def test_ending_wakes_a_receiver_that_is_blocked(self, how: str) -> None:
        one, _ = self.pair()
        for out in (None, tensor_of("int8", (3,))):
            one, _ = self.pair()
            waiting = Call(lambda o=out, p=one: p.recv_tensor(o, timeout=_LONG_S))  # type: ignore[misc]
            assert waiting.is_blocked(0.1)
            _end(one, how)
            waiting.raised(ClosedError)

    @law("ALL-1", needs="a_limit")
    @pytest.mark.parametrize("how", ENDS)
    def test_ending_wakes_a_sender_that_is_blocked(self, how: str) -> None:
        one, _ = self.limited_pair()
        fill(one)
        waiting = Call(lambda: one.send_tensor(tensor_of("uint8", (LIMIT,)), timeout=_LONG_S))
        assert waiting.is_blocked(0.1)
        _end(one, how)
        waiting.raised(ClosedError)

    @law("ALL-1")
    def test_closing_a_listener_wakes_whoever_accepts(self) -> None:
        listener = self.endpoint().listen()
        self.later(listener.close)
        waiting = Call(lambda: listener.accept(timeout=_LONG_S))
        assert waiting.is_blocked(0.1)
        Call(listener.close).result()
        waiting.raised(ClosedError)

    @law("ALL-1")
    @pytest.mark.parametrize("second", ENDS)
    @pytest.mark.parametrize("first", ENDS)
    def test_ending_twice_is_ending_once(self, first: str, second: str) -> None:
        one, other = self.pair()
        sent(one, tensor_of("int8", (3,)))
        _end(one, first)
        for how in (second, second, first):
            assert one.closed
            Call(getattr(one, how)).result()
        raises(ClosedError, lambda: one.send_tensor(None))
        _end(other, "abort")
        for how in (first, second):  # also if the peer is gone
            Call(getattr(one, how)).result()

    @law("ALL-1")
    @pytest.mark.parametrize("how", ENDS)
    def test_after_an_end_every_call_raises_closed(self, how: str) -> None:
        one, other = self.pair()
        sent(other, tensor_of("int8", (3,)))  # a message that waits to be received changes nothing
        _end(one, how)
        for timeout in (0, None, waits.patience_s):
            for call in (
                lambda t=timeout: one.send_tensor(None, timeout=t),
                lambda t=timeout: one.send_tensor(tensor_of("int8", (3,)), timeout=t),
                lambda t=timeout: one.recv_tensor(timeout=t),
                lambda t=timeout: one.recv_tensor(tensor_of("int8", (3,)), timeout=t),
            ):
                raises(ClosedError, call)
        assert one.closed
        assert isinstance(one.peer, str)

    @law("ALL-1")
    def test_a_closed_listener_accepts_nobody_and_closes_again(self) -> None:
        end = self.endpoint()
        listener = end.listen()
        for _ in range(3):
            Call(listener.close).result()
        for timeout in (0, None, waits.patience_s):
            raises(ClosedError, lambda t=timeout: listener.accept(timeout=t))  # type: ignore[misc]

    @law("ALL-1")
    @pytest.mark.parametrize("how", ENDS)
    def test_closed_says_whether_this_end_was_ended_and_peer_who_the_other_is(self, how: str) -> None:
        one, other = self.pair()
        assert (one.closed, other.closed) == (False, False)
        assert isinstance(one.peer, str)
        assert one.peer.strip(), "peer says nothing"
        _end(one, how)
        assert one.closed, f"closed is false after {how}()"
        raises(PeerGoneError, lambda: other.recv_tensor(timeout=waits.patience_s))
        assert not other.closed, "the other end is closed, though only this one was"
        assert other.peer.strip()

    @law("ALL-1", "PIPE-1")
    def test_closing_sends_what_was_accepted_first(self) -> None:
        for sizes in ((3,), (3 * MIB, 5, 7 * MIB, 0, 100_000)):
            one, other = self.pair()
            messages = [tensor_of("uint8", (size,), seed=size) for size in sizes]
            transfers = [sent(one, message) for message in [*messages, None]]
            closing = Call(lambda p=one: p.close(timeout=_LONG_S))  # type: ignore[misc]
            for message in [*messages, None]:
                lost = difference(message, received(other))
                assert not lost, f"after a polite close: {lost}"
            closing.result()
            assert [transfer.error() for transfer in transfers if transfer.done()] == [None] * len(transfers)
            raises(PeerGoneError, lambda p=other: p.recv_tensor(timeout=waits.patience_s))  # type: ignore[misc]

    @law("ALL-1")
    def test_while_it_closes_calls_are_refused(self) -> None:
        one, other = self.pair()
        message = tensor_of("uint8", (16 * MIB,))
        sent(one, message)
        closing = Call(lambda: one.close(timeout=_LONG_S))
        until(lambda: one.closed or closing.ended, what="closed, of a pipe that closes,")
        raises(ClosedError, lambda: one.send_tensor(None, timeout=_LONG_S))
        raises(ClosedError, lambda: one.recv_tensor(timeout=_LONG_S))
        assert_same(message, received(other))
        closing.result()

    @law("ALL-1", needs="a_limit")
    def test_aborting_ends_a_close_that_waits_for_the_peer(self) -> None:
        one, _ = self.limited_pair()
        sent(one, tensor_of("uint8", (self.beyond_limit_bytes + 8 * MIB,)))
        closing = Call(lambda: one.close(timeout=_LONG_S))
        closing.is_blocked(0.2)
        Call(one.abort).result()
        closing.result()
        assert one.closed

    @law("ALL-1")
    def test_leaving_a_with_block_closes_politely(self) -> None:
        one, other = self.pair()
        message = tensor_of("uint8", (4 * MIB,))

        def use() -> None:
            with one as pipe:
                assert pipe is one, "with does not give the pipe"
                pipe.send_tensor(message)

        using = Call(use)
        assert_same(message, received(other))
        using.result()
        assert one.closed
        raises(PeerGoneError, lambda: other.recv_tensor(timeout=waits.patience_s))

    @law("ALL-1")
    def test_an_exception_in_a_with_block_aborts_and_comes_out(self) -> None:
        one, other = self.pair()

        def use() -> None:
            with one:
                one.send_tensor(tensor_of("uint8", (64 * MIB,)))
                raise KeyError("of the test")

        raises(KeyError, use)
        assert one.closed
        with pytest.raises(PeerGoneError):
            while True:
                received(other)

    # -- the other end -------------------------------------------------------------------------

    @law("ALL-2", "PIPE-1")
    def test_what_was_sent_before_a_polite_close_is_received_before_the_peer_is_gone(self) -> None:
        one, other = self.pair()
        messages = [tensor_of("int32", (number % 7,), seed=number) for number in range(50)]
        for message in messages:
            sent(one, message)
        closing = Call(lambda: one.close(timeout=_LONG_S))
        for number, message in enumerate(messages):
            call = Call(lambda: other.recv_tensor(timeout=waits.patience_s)).end(waits.patience_s + 1)
            assert call.error is None, f"message {number} of 50 was sent before the close: {call.error!r}"
            assert_same(message, call.value)
        closing.result()
        for _ in range(3):
            raises(PeerGoneError, lambda: other.recv_tensor(timeout=_LONG_S))

    @law("ALL-2", "PIPE-1")
    def test_what_comes_before_an_abort_is_whole_and_in_order(self) -> None:
        for size in (100, 100_000, 5 * MIB):
            one, other = self.pair()
            messages = [tensor_of("uint8", (size,), seed=number) for number in range(4)]
            for message in messages:
                sent(one, message)
            Call(one.abort).result()
            got: list[Any] = []
            with pytest.raises(PeerGoneError):
                while len(got) <= len(messages):
                    got.append(received(other))
            for message, each in zip(messages, got, strict=False):
                assert_same(message, each)

    @law("ALL-2")
    @pytest.mark.parametrize("how", ENDS)
    def test_a_receiver_that_is_blocked_learns_that_its_peer_has_ended(self, how: str) -> None:
        for out in (None, tensor_of("int8", (3,))):
            one, other = self.pair()
            waiting = Call(lambda o=out, p=other: p.recv_tensor(o, timeout=_LONG_S))  # type: ignore[misc]
            assert waiting.is_blocked(0.1)
            _end(one, how)
            waiting.raised(PeerGoneError)
            raises(PeerGoneError, lambda p=other: p.recv_tensor(timeout=_LONG_S))  # type: ignore[misc]

    @law("ALL-2", needs="a_limit")
    @pytest.mark.parametrize("how", ENDS)
    def test_a_sender_that_is_blocked_learns_that_its_peer_has_ended(self, how: str) -> None:
        one, other = self.limited_pair()
        fill(one)
        waiting = Call(lambda: one.send_tensor(tensor_of("uint8", (LIMIT,)), timeout=_LONG_S))
        assert waiting.is_blocked(0.1)
        _end(other, how)
        waiting.raised(PeerGoneError)

    @law("ALL-2")
    @pytest.mark.parametrize("how", ENDS)
    def test_whoever_sends_to_a_peer_that_has_ended_is_told(self, how: str) -> None:
        one, other = self.pair()
        _end(other, how)
        _told("send_tensor", lambda: one.send_tensor(None, timeout=0.5))
        _told("send_tensor", lambda: one.send_tensor(tensor_of("uint8", (3 * MIB,)), timeout=0.5))
        raises(PeerGoneError, lambda: one.recv_tensor(timeout=_LONG_S))
        raises(PeerGoneError, lambda: one.send_tensor(None, timeout=_LONG_S))
        assert not one.closed
        Call(lambda: one.close(timeout=_LONG_S)).result()
        raises(ClosedError, lambda: one.send_tensor(None))
        raises(ClosedError, lambda: one.recv_tensor(timeout=0))

    @law("ALL-2", needs="both_ways")
    def test_an_end_that_has_much_to_receive_can_be_ended_and_so_can_the_other(self) -> None:
        for how in ENDS:
            one, other = self.pair()
            for pipe in (one, other):
                for number in range(20):
                    sent(pipe, tensor_of("int16", (number,)))
            _end(one, how)
            if how == "close":  # its timeout is 0.1 s: enough, unless it waits for a receiver
                got = 0
                with pytest.raises(PeerGoneError):
                    while got <= 20:
                        assert_same(tensor_of("int16", (got,)), received(other))
                        got += 1
            _end(other, how)


def _told(name: str, call: Callable[[], Any]) -> None:
    """Repeat a call until it raises PeerGoneError; before the death is detected it may succeed."""

    def told() -> bool:
        error = Call(call).end().error
        if error is not None and not isinstance(error, PeerGoneError | TimeoutError):
            raise error
        return isinstance(error, PeerGoneError)

    until(told, what=f"PeerGoneError from {name}")
