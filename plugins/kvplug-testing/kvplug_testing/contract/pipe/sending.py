"""Order under load (law PIPE-1), back pressure (laws PIPE-2 and PIPE-3) and threads (law PIPE-7)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvplug import TimeoutError
from kvplug.transport import BusyError, Pipe
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import numbered, tensor_of
from kvplug_testing.contract.pipe.suite import LIMIT, MIB, PipeSuite, fill, received, sent
from kvplug_testing.waits import Call, raises

_SMALL = (0, 1, 0, 7, 100, 1000, 5000)
_LARGE = (1000, 0, MIB - 1, 70_000, 4096, MIB + 1, 1, 3 * MIB)
_MANY_EMPTY = 50_000
"""Far more empty messages than any accounting allows in 64 KiB."""
_EMPTY_FRAME_BYTES = 16
"""The least that the operating system holds of an empty message: its header."""


class Sending(PipeSuite):
    """Many messages from one end to the other."""

    @law("PIPE-1")
    @pytest.mark.parametrize(("count", "sizes"), [(2500, _SMALL), (50, _LARGE)], ids=["small", "large"])
    def test_many_messages_arrive_once_and_in_order_also_both_ways_at_once(
        self, count: int, sizes: tuple[int, ...]
    ) -> None:
        one, other = self.pair()
        _load([(one, other), *([] if self.both_ways else [(other, one)])], count, sizes)

    @law("PIPE-1", "PIPE-2", needs="a_limit")
    def test_order_holds_where_the_sender_has_to_wait_for_room_again_and_again(self) -> None:
        _load([self.limited_pair(10_000)], 2000, _SMALL)

    # -- back pressure -------------------------------------------------------------------------

    @law("PIPE-3", "PIPE-2", needs="a_limit", level="long")
    @pytest.mark.parametrize("nbytes", [2000, 3 * MIB])
    def test_with_the_receiver_stopped_what_is_held_is_bounded(self, nbytes: int) -> None:
        one, other = self.limited_pair()
        transfers = fill(one, nbytes)
        accepted = len(transfers) * nbytes
        bound = LIMIT + nbytes + self.beyond_limit_bytes
        said = f"{LIMIT} may be unsent, {nbytes} are one message, {self.beyond_limit_bytes} lie beyond"
        assert 0 < accepted <= bound, f"{accepted} bytes were accepted without a receiver: {said}"
        for number, transfer in enumerate(transfers):
            assert_same(numbered(number, nbytes), received(other), f"message {number}")
            transfer.wait(waits.patience_s)

    @law("PIPE-2", needs="a_limit")
    def test_as_much_as_the_limit_is_accepted_at_once(self) -> None:
        one, _ = self.limited_pair()
        count, accepted = LIMIT // (MIB // 4), len(fill(one, timeout=0))
        assert accepted >= count - 1, f"only {accepted} of {count} messages that the limit allows"

    @law("PIPE-3", needs="a_limit")
    def test_messages_without_content_do_not_pile_up_without_bound(self) -> None:
        one, _ = self.limited_pair(64 << 10)

        def pile() -> None:
            for _ in range(_MANY_EMPTY + self.beyond_limit_bytes // _EMPTY_FRAME_BYTES):
                one.send_tensor(None, timeout=0.1)

        Call(pile).raised(TimeoutError, 50.0)

    @law("PIPE-2", needs="a_limit")
    def test_a_message_larger_than_the_limit_passes_alone(self) -> None:
        one, other = self.limited_pair(1000)
        small = tensor_of("uint8", (10,))
        message = tensor_of("uint8", (self.beyond_limit_bytes + 8 * MIB,))
        transfer = sent(one, message)
        raises(TimeoutError, lambda: one.send_tensor(small, timeout=0.2))
        assert_same(message, received(other))
        transfer.wait(waits.patience_s)
        sent(one, small)
        assert_same(small, received(other))

    @law("PIPE-2", needs="a_limit")
    def test_a_send_that_timed_out_has_queued_nothing(self) -> None:
        one, other = self.limited_pair()
        accepted = [*range(len(fill(one)))]
        for number in range(1000, 1030):
            message = numbered(number, MIB // 4)
            call = Call(partial(one.send_tensor, message, timeout=(0, 0.01)[number % 2])).end()
            if call.error is None:
                accepted.append(number)
            else:
                call.raised(TimeoutError)
            if number % 10 == 9:  # make room for some of them
                assert_same(numbered(accepted.pop(0), MIB // 4), received(other))
        last = Call(lambda: one.send_tensor(None, timeout=waits.patience_s))
        for number in accepted:
            assert_same(numbered(number, MIB // 4), received(other), f"message {number}")
        last.result()
        assert received(other) is None

    # -- threads -------------------------------------------------------------------------------

    @law("PIPE-7")
    def test_a_second_receiver_is_refused_and_the_first_goes_on(self) -> None:
        one, other = self.pair()
        first = _refused(
            lambda: other.recv_tensor(timeout=10 * waits.patience_s), lambda: other.recv_tensor(timeout=0)
        )
        messages = [tensor_of("int32", (3,), seed=number) for number in range(2)]
        for message in messages:
            sent(one, message)
        assert_same(messages[0], first.result())
        assert_same(messages[1], received(other), "the refused receiver took something")

    @law("PIPE-7", needs="a_limit")
    def test_a_second_sender_is_refused_and_the_first_goes_on(self) -> None:
        one, other = self.limited_pair()
        count = len(fill(one))
        message, refused = (tensor_of("uint8", (LIMIT // 2,), seed=seed) for seed in (1, 2))
        first = _refused(
            lambda: one.send_tensor(message, timeout=10 * waits.patience_s),
            # As large as the first message: if that one is late, there is no room for this one either.
            lambda: one.send_tensor(refused, timeout=0),
        )
        for number in range(count):
            got = received(other)
            assert_same(numbered(number, MIB // 4), got, "a message has come that was not sent")
        first.result()
        assert_same(message, received(other), "the message of the refused sender has come")

    @law("PIPE-7", "PIPE-2", needs="both_ways_and_a_limit")
    def test_one_thread_sends_while_another_receives(self) -> None:
        one, other = self.limited_pair()
        receiving = Call(lambda: one.recv_tensor(timeout=10 * waits.patience_s))
        assert receiving.is_blocked(0.1)
        count = len(fill(one))  # the other end receives nothing meanwhile
        sending = Call(lambda: one.send_tensor(tensor_of("uint8", (LIMIT,)), timeout=10 * waits.patience_s))
        assert sending.is_blocked(0.1), f"a sender beside a receiver: {sending.error!r}"
        message = tensor_of("uint8", (LIMIT,))
        sent(other, message)
        assert_same(message, receiving.result())
        for _ in range(count + 1):
            received(other)
        sending.result()


def _refused(first: Callable[[], Any], second: Callable[[], Any]) -> Call:
    """The first call, still blocked, after a concurrent second call was refused with BusyError."""
    waiting = Call(first)
    limit = time.monotonic() + waits.patience_s
    while time.monotonic() < limit:
        if waiting.ended and isinstance(waiting.error, BusyError):
            waiting = Call(first)  # it started while the second call was inside
        error = Call(second).end().error
        if isinstance(error, BusyError):
            assert waiting.is_blocked(0.05), f"the first call was disturbed: {waiting.error!r}"
            return waiting
        assert isinstance(error, TimeoutError), f"a second call got in: {error!r}"
        time.sleep(0.005)
    raise AssertionError("a second call waits beside the first: BusyError never came")


def _numbered(number: int, sizes: tuple[int, ...]) -> Any:
    """Message ``number``: every ninth is ``None``; the others hold the number in all of their bytes."""
    import torch

    if number % 9 == 4:
        return None
    return torch.full((1 + sizes[number % len(sizes)] // 4,), number, dtype=torch.int32)


def _load(ways: list[tuple[Pipe, Pipe]], count: int, sizes: tuple[int, ...]) -> None:
    calls = [Call(partial(_receive, receiver, count, sizes)) for _, receiver in ways]
    calls += [Call(partial(_send, sender, count, sizes)) for sender, _ in ways]
    for call in calls:
        call.result(50.0)


def _send(pipe: Pipe, count: int, sizes: tuple[int, ...]) -> None:
    transfers = [pipe.send_tensor(_numbered(number, sizes)) for number in range(1, count + 1)]
    for transfer in transfers:
        transfer.wait(waits.patience_s)


def _receive(pipe: Pipe, count: int, sizes: tuple[int, ...]) -> None:
    """Messages stay as they are when more arrive."""
    kept = [pipe.recv_tensor(timeout=waits.patience_s) for _ in range(count)]
    for number, got in enumerate(kept, 1):
        assert_same(_numbered(number, sizes), got, f"message {number:,} of {count:,}")
