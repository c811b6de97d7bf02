"""Messages under way: order, back pressure, transfers, deadlines and threads (laws PIPE-1 to 7 and ALL-5)."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Final

import pytest

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.transport import Pipe, Transfer
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import numbered, tensor_of
from kvplug_testing.contract.pipe.suite import LIMIT, MIB, PipeSuite, drain, fill, passes, received, sent
from kvplug_testing.waits import Call, raises, until

_SMALL: Final = (0, 1, 0, 7, 100, 1000, 5000)
_LARGE: Final = (1000, 0, MIB - 1, 70_000, 4096, MIB + 1, 1, 3 * MIB)
_MANY_EMPTY: Final = 50_000
"""Far more empty messages than any accounting allows in 64 KiB."""
_EMPTY_FRAME_BYTES: Final = 16
"""The least that the operating system holds of an empty message: its header."""


class Sending(PipeSuite):
    """Many messages from one end to the other."""

    # -- order ---------------------------------------------------------------------------------

    @law("PIPE-1", "PIPE-2")
    @pytest.mark.parametrize(
        ("limit", "count", "sizes"), [(None, 1100, _SMALL), (10_000, 300, _SMALL), (None, 50, _LARGE)]
    )
    def test_many_messages_arrive_once_and_in_order_also_both_ways_at_once(
        self, limit: int | None, count: int, sizes: tuple[int, ...]
    ) -> None:
        """With a small limit the sender has to wait for room again and again."""
        one, other = self.pair(limit)
        _load([(one, other), *([] if self.both_ways else [(other, one)])], count, sizes)

    # -- back pressure -------------------------------------------------------------------------

    @law("PIPE-3", "PIPE-2")
    @pytest.mark.parametrize("nbytes", [20_000, MIB // 4, 3 * MIB])
    def test_with_the_receiver_stopped_about_the_limit_is_held_and_no_more(self, nbytes: int) -> None:
        one, other = self.limited_pair()
        transfers = fill(one, nbytes)
        least, most = LIMIT * 3 // 4 - nbytes, LIMIT + nbytes + self.beyond_limit_bytes
        accepted = len(transfers) * nbytes
        bounds = f"{LIMIT} may be unsent, {nbytes} are one message, {self.beyond_limit_bytes} lie beyond"
        assert max(1, least) <= accepted <= most, (
            f"{accepted} bytes were accepted, and none received: {bounds}"
        )
        drain(other, range(len(transfers)), nbytes)
        for transfer in transfers:
            transfer.wait(waits.patience_s)

    @law("PIPE-3")
    def test_messages_without_content_do_not_pile_up_without_bound(self) -> None:
        one, _ = self.limited_pair(64 << 10)

        def pile() -> None:
            for _ in range(_MANY_EMPTY + self.beyond_limit_bytes // _EMPTY_FRAME_BYTES):
                one.send_tensor(None, timeout=0.1)

        Call(pile).raised(TimeoutError, 50.0)

    @law("PIPE-2")
    def test_a_message_larger_than_the_limit_passes_alone(self) -> None:
        one, other = self.limited_pair(1000)
        small = tensor_of("uint8", (10,))
        message = tensor_of("uint8", (self.beyond_limit_bytes + 8 * MIB,))
        transfer = sent(one, message)
        raises(TimeoutError, partial(one.send_tensor, small, timeout=0.2))
        assert_same(message, received(other))
        transfer.wait(waits.patience_s)
        passes(one, other, small)

    @law("PIPE-2")
    def test_a_send_that_timed_out_has_queued_nothing(self) -> None:
        one, other = self.limited_pair()
        accepted = [*range(len(fill(one)))]
        for number in range(1000, 1030):
            send = partial(one.send_tensor, numbered(number, MIB // 4), timeout=0.01 * (number % 2))
            if not isinstance(Call(send).outcome(), TimeoutError):
                accepted.append(number)
            if number % 10 == 9:  # make room for some of them
                drain(other, [accepted.pop(0)])
        last = Call(lambda: one.send_tensor(None, timeout=waits.patience_s))
        drain(other, accepted)
        last.result()
        assert received(other) is None

    # -- transfers --------------------------------------------------------------------------------

    @law("PIPE-4")
    @pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
    def test_what_is_overwritten_once_the_transfer_is_done_arrives_as_it_was(self, nbytes: int) -> None:
        one, other = self.pair()
        source = numbered(1, nbytes)
        transfer = sent(one, source)
        receiving = None
        if isinstance(Call(lambda: transfer.wait(0.2)).outcome(), TimeoutError):  # it ends only when received
            receiving = Call(lambda: other.recv_tensor(timeout=waits.patience_s))
            transfer.wait(waits.patience_s)
        source.fill_(0xEE)
        got = received(other) if receiving is None else receiving.result()
        assert_same(numbered(1, nbytes), got, "overwriting the tensor after done() reached the peer")

    @law("PIPE-4")
    def test_the_pipe_keeps_alive_what_it_has_not_sent(self) -> None:
        import torch

        one, other = self.pair()
        transfers = []
        for number in range(12):
            transfers.append(sent(one, torch.full((MIB // 4 + number,), number, dtype=torch.int32)))
            torch.full((MIB // 4 + number,), -1, dtype=torch.int32)  # reuses freed memory
        for number, transfer in enumerate(transfers):
            wanted = torch.full((MIB // 4 + number,), number, dtype=torch.int32)
            assert_same(wanted, received(other), f"message {number} was not kept alive")
            transfer.wait(waits.patience_s)

    @law("ALL-5", "ALL-1")
    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_a_transfer_ends_and_each_callback_is_called_once_though_one_raises_and_one_ends_the_pipe(
        self, end: str
    ) -> None:
        one, other = self.pair()
        for message in (None, *(numbered(1, size) for size in (0, 3, 3 * MIB))):
            calls: list[tuple[str, bool]] = []
            transfer = sent(one, message)
            with contextlib.suppress(KeyError):  # of one that was done already
                transfer.add_done_callback(_raise)
            transfer.add_done_callback(lambda t: calls.append(("before", t.done())))  # noqa: B023
            received(other)
            until(transfer.done, what=f"the end of {transfer!r}, whose message has been received,")
            assert transfer.error() is None
            transfer.add_done_callback(lambda t: calls.append(("after", t.done())))  # noqa: B023
            until(lambda: len(calls) >= 2, what="a callback of a transfer that has ended")  # noqa: B023
            sent(one, None)  # a second callback would have been called by now
            assert received(other) is None
            assert sorted(calls) == [("after", True), ("before", True)]  # from two threads, perhaps
        ended: list[None] = []
        transfer = sent(one, numbered(1, 3 * MIB))
        adding = Call(lambda: transfer.add_done_callback(lambda _: ended.append(getattr(one, end)())))
        received(other)
        until(lambda: ended, what=f"the end of {end}() in a callback")
        adding.result()
        raises(ClosedError, lambda: one.send_tensor(None))

    @law("ALL-5")
    @pytest.mark.parametrize("how", ["abort", "close"])
    def test_every_transfer_ends_when_its_end_ends(self, how: str) -> None:
        """The general laws judge the end of the other end."""
        one, _ = self.limited_pair()
        called: list[Transfer] = []
        transfers = fill(one)
        for transfer in transfers:
            transfer.add_done_callback(called.append)
        waiting = Call(lambda: transfers[-1].wait(4 * waits.patience_s))
        Call(one.abort if how == "abort" else partial(one.close, 0.1)).result()
        until(lambda: len(called) == len(transfers), what="the callback of each transfer")
        for transfer in transfers:
            error = transfer.error()
            assert error is None or isinstance(error, ClosedError), f"{transfer}: {error!r}"
        assert waiting.end().error is transfers[-1].error()

    # -- a polite close ------------------------------------------------------------------------

    @law("ALL-1", "ALL-2", "PIPE-1")
    @pytest.mark.parametrize("sizes", [(3,), (16 * MIB, 5, 7 * MIB, 0, 100_000), range(50)], ids=len)
    def test_closing_sends_what_was_accepted_first_and_then_the_peer_is_gone(self, sizes: Any) -> None:
        one, other = self.pair()
        messages = [None, *(numbered(size, size) for size in sizes)]
        transfers = [sent(one, message) for message in messages]
        closing = Call(lambda: one.close(timeout=10 * waits.patience_s))
        until(lambda: one.closed or closing.ended, what="closed, of a pipe that closes,")
        raises(ClosedError, lambda: one.recv_tensor(timeout=waits.patience_s))
        for message in messages:
            assert_same(message, received(other), "after a polite close")
        closing.result()
        assert [transfer.error() for transfer in transfers if transfer.done()] == [None] * len(transfers)
        raises(PeerGoneError, lambda: other.recv_tensor(timeout=waits.patience_s))

    # -- threads -------------------------------------------------------------------------------

    @law("PIPE-7", "PIPE-2", needs="both_ways")
    def test_one_thread_sends_while_another_receives(self) -> None:
        one, other = self.limited_pair()
        receiving = Call(lambda: one.recv_tensor(timeout=10 * waits.patience_s))
        assert receiving.is_blocked(0.1)
        count, message = len(fill(one)), tensor_of("uint8", (LIMIT,))
        sending = Call(lambda: one.send_tensor(message, timeout=10 * waits.patience_s))
        assert sending.is_blocked(0.1), f"a sender beside a receiver: {sending.error!r}"
        sent(other, message)
        assert_same(message, receiving.result())
        drain(other, range(count))
        assert_same(message, received(other))
        sending.result()


def _message(number: int, sizes: tuple[int, ...]) -> Any:
    """Message ``number``: every ninth is ``None``."""
    return None if number % 9 == 4 else numbered(number, sizes[number % len(sizes)])


def _load(ways: list[tuple[Pipe, Pipe]], count: int, sizes: tuple[int, ...]) -> None:
    def send(pipe: Pipe) -> None:
        transfers = [pipe.send_tensor(_message(number, sizes)) for number in range(count)]
        for transfer in transfers:
            transfer.wait(waits.patience_s)

    def receive(pipe: Pipe) -> None:
        kept = [pipe.recv_tensor(timeout=waits.patience_s) for _ in range(count)]
        for number, got in enumerate(kept):  # messages stay as they are when more arrive
            assert_same(_message(number, sizes), got, f"message {number:,} of {count:,}")

    calls = [Call(partial(receive, receiver)) for _, receiver in ways]
    calls += [Call(partial(send, sender)) for sender, _ in ways]
    for call in calls:
        call.result(50.0)


def _raise(_: Transfer) -> None:
    raise KeyError("a callback of the test")
