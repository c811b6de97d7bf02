"""Back pressure (laws PIPE-2 and PIPE-3): how much a sender may send without a receiver, and what happens at
the limit.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvplug import TimeoutError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.footprint import private_bytes
from kvplug_testing.contract.pipe.content import numbered, tensor_of
from kvplug_testing.contract.pipe.suite import LIMIT, MIB, PipeSuite, fill, received, sent
from kvplug_testing.waits import Call, raises

_EMPTY_ROUND = 50_000
"""Far more empty messages than any accounting allows in 64 KiB."""
_EMPTY_FRAME_BYTES = 16
"""What the operating system holds of an empty message: its header."""
_EMPTY_HELD_BYTES = 8
"""The least memory that a process needs to hold a message: a pointer."""


class Backpressure(PipeSuite):
    """Pairs with a low limit of unsent bytes, without a receiver."""

    @law("PIPE-3", "PIPE-2", needs="a_limit", level="long")
    @pytest.mark.parametrize("nbytes", [2000, MIB, 3 * MIB])
    def test_with_the_receiver_stopped_what_is_held_is_bounded(self, nbytes: int) -> None:
        one, other = self.limited_pair()
        transfers = fill(one, nbytes)
        accepted = len(transfers) * nbytes
        bound = LIMIT + nbytes + self.beyond_limit_bytes
        said = f"{LIMIT} may be unsent, {nbytes} are one message, {self.beyond_limit_bytes} lie beyond"
        assert accepted <= bound, f"{accepted} bytes were accepted without a receiver: {said}"
        assert transfers, "not even one message was accepted"
        for number, transfer in enumerate(transfers):
            _check(received(other), number, nbytes)
            transfer.wait(waits.patience_s)

    @law("PIPE-2", needs="a_limit")
    def test_as_much_as_the_limit_is_accepted_at_once(self) -> None:
        one, other = self.limited_pair()
        count = LIMIT // (MIB // 4)
        accepted = Call(lambda: fill(one, MIB // 4, timeout=0)).result()
        assert len(accepted) >= count - 1, f"only {len(accepted)} of {count} messages that the limit allows"
        for number in range(len(accepted)):
            _check(received(other), number, MIB // 4)

    @law("PIPE-3", needs="a_limit")
    @pytest.mark.parametrize("kind", ["None", "empty tensors"])
    def test_messages_without_content_do_not_pile_up_without_bound(self, kind: str) -> None:
        """They may be accepted while the operating system holds them, which has a bound of its own: that is
        no memory of this process, in which both ends are.
        """
        one, _ = self.limited_pair(64 << 10)
        message = None if kind == "None" else tensor_of("float32", (0, 3))

        def pile() -> bool:
            """Whether a round of them was accepted."""
            for _ in range(_EMPTY_ROUND):
                try:
                    one.send_tensor(message, timeout=0.1)
                except TimeoutError:
                    return False
            return True

        before = 0
        for number in range(1, 4 + self.beyond_limit_bytes // (_EMPTY_ROUND * _EMPTY_FRAME_BYTES)):
            if not Call(pile).result(50.0):
                return
            if number == 1:
                before = private_bytes()  # the first round fills what is made once
                continue
            grown, least = private_bytes() - before, (number - 1) * _EMPTY_ROUND * _EMPTY_HELD_BYTES
            count = number * _EMPTY_ROUND
            assert grown < least, (
                f"{count:,} were accepted, none received, and memory grew by {grown:,} bytes"
            )

    @law("PIPE-2", needs="a_limit")
    def test_a_message_larger_than_the_limit_passes_alone(self) -> None:
        one, other = self.limited_pair(1000)
        message = tensor_of("uint8", (self.beyond_limit_bytes + 8 * MIB,))
        sent(one, tensor_of("uint8", (10,)))
        received(other)
        transfer = sent(one, message)
        raises(TimeoutError, lambda: one.send_tensor(tensor_of("uint8", (10,)), timeout=0.2))
        assert_same(message, received(other))
        transfer.wait(waits.patience_s)
        sent(one, tensor_of("uint8", (10,)))
        assert_same(tensor_of("uint8", (10,)), received(other))

    @law("PIPE-2", needs="a_limit")
    def test_a_send_that_timed_out_has_queued_nothing(self) -> None:
        one, other = self.limited_pair()
        accepted = [*range(len(fill(one)))]
        for number in range(1000, 1030):
            message = numbered(number, MIB // 4)
            timeout = (0, 0.01)[number % 2]
            call = Call(lambda m=message, t=timeout: one.send_tensor(m, timeout=t)).end()  # type: ignore[misc]
            if call.error is None:
                accepted.append(number)
            elif not isinstance(call.error, TimeoutError):
                raise call.error
            if number % 10 == 9:  # make room for some of them
                _check(received(other), accepted.pop(0), MIB // 4)
        if not self.both_ways:
            sent(other, None)  # the other direction is not affected
            assert received(one) is None
        last = Call(lambda: one.send_tensor(numbered(1030, 3), timeout=waits.patience_s))
        for number in accepted:
            _check(received(other), number, MIB // 4)
        last.result()
        _check(received(other), 1030, 3)
        raises(TimeoutError, lambda: other.recv_tensor(timeout=0.2))

    @law("PIPE-2", needs="both_ways_and_a_limit")
    def test_one_direction_that_is_clogged_does_not_stop_the_other(self) -> None:
        one, other = self.limited_pair()
        fill(one)
        for number in range(20):
            message = tensor_of("uint8", (100_000,), seed=number)
            sending = Call(lambda message=message: other.send_tensor(message, timeout=waits.patience_s))  # type: ignore[misc]
            assert_same(message, received(one))
            sending.result()


def _check(message: Any, number: int, nbytes: int) -> None:
    assert_same(numbered(number, nbytes), message, f"message {number}")
