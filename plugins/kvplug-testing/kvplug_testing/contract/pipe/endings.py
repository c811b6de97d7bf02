"""How a pipe ends: closing and aborting it (law ALL-1), and the effect on the other end (law ALL-2)."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug import ClosedError, PeerGoneError
from kvplug.transport import Pipe
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
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

    @law("ALL-1", "ALL-2", "PIPE-1")
    def test_closing_sends_what_was_accepted_first_and_then_the_peer_is_gone(self) -> None:
        for sizes in ((3,), (3 * MIB, 5, 7 * MIB, 0, 100_000), range(50)):
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

    # -- the other end -------------------------------------------------------------------------

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
