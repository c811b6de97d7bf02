"""Transfers: how they end (law ALL-5), and when the tensor's memory may be reused (law PIPE-4)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.transport import Transfer
from kvplug_testing import waits
from kvplug_testing.comparison import assert_filled, assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, fill, received, sent
from kvplug_testing.waits import Call, raises, until


class Transfers(PipeSuite):
    """The transfers that ``send_tensor`` returns."""

    # -- memory --------------------------------------------------------------------------------

    @law("PIPE-4")
    @pytest.mark.parametrize("nbytes", [1, 1000, 100_000, 3 * MIB])
    def test_what_is_overwritten_once_the_transfer_is_done_arrives_as_it_was(self, nbytes: int) -> None:
        one, other = self.pair()
        source = tensor_of("uint8", (nbytes,))
        wanted = source.clone()
        transfer = sent(one, source)
        receiving = None
        if Call(lambda: transfer.wait(0.2)).end().error is not None:  # it ends only when received
            receiving = Call(lambda: other.recv_tensor(timeout=waits.patience_s))
            transfer.wait(waits.patience_s)
        source.fill_(0xEE)
        got = received(other) if receiving is None else receiving.result()
        changed = difference(wanted, got)
        assert not changed, f"overwriting the tensor after done() reached the peer: {changed}"

    @law("PIPE-4")
    def test_one_buffer_can_be_sent_again_and_again(self) -> None:
        import torch

        one, other = self.pair()
        buffer = torch.empty(50_000, dtype=torch.int32)

        def send() -> None:
            for number in range(100):
                buffer.fill_(number)
                one.send_tensor(buffer, timeout=waits.patience_s).wait(waits.patience_s)

        sending = Call(send)
        for number in range(100):
            got = received(other)
            assert_filled(number, got, f"message {number} was overwritten after done()")
        sending.result()

    @law("PIPE-4")
    def test_the_pipe_keeps_alive_what_it_has_not_sent(self) -> None:
        import torch

        one, other = self.pair()
        transfers = []
        for number in range(12):
            transfers.append(sent(one, torch.full((MIB // 4 + number,), number, dtype=torch.int32)))
            torch.full((MIB // 4 + number,), -1, dtype=torch.int32)  # reuses freed memory
        for number, transfer in enumerate(transfers):
            got = received(other)
            wanted = torch.full((1,), number, dtype=torch.int32).expand(MIB // 4 + number)
            assert_same(wanted, got, f"message {number} was not kept alive")
            transfer.wait(waits.patience_s)

    # -- how they end --------------------------------------------------------------------------

    @law("ALL-5")
    def test_every_transfer_ends_once_it_was_received(self) -> None:
        one, other = self.pair()
        for message in (
            tensor_of("int8", (3,)),
            None,
            tensor_of("int8", (0,)),
            tensor_of("int8", (2 * MIB,)),
        ):
            transfer = sent(one, message)
            received(other)
            until(transfer.done, what=f"the end of {transfer!r}, whose message has been received,")
            assert transfer.error() is None
            Call(lambda t=transfer: t.wait(0)).result()  # type: ignore[misc]
            Call(lambda t=transfer: t.wait()).result()  # type: ignore[misc]

    @law("ALL-5", "ALL-4", needs="a_limit")
    def test_waiting_for_a_transfer_has_a_deadline(self) -> None:
        one, other = self.limited_pair()
        transfers = [sent(one, tensor_of("uint8", (self.beyond_limit_bytes + 8 * MIB,)))]
        under_way = [transfer for transfer in transfers if not transfer.done()]
        for transfer in under_way:
            assert transfer.error() is None, "it has an error before it has ended"
            for timeout in (0, 0.3):
                call = Call(lambda t=transfer, s=timeout: t.wait(s))  # type: ignore[misc]
                call.raised(TimeoutError)
                assert call.took_s > timeout - 0.05, f"wait({timeout}) gave up after {call.took_s:.2f} s"
        for _ in transfers:
            received(other)
        for transfer in transfers:
            transfer.wait(waits.patience_s)
            raises(ValueError, lambda t=transfer: t.wait(-1))  # type: ignore[misc]

    @law("ALL-5")
    @pytest.mark.parametrize("nbytes", [10, 3 * MIB])
    def test_a_callback_is_called_once_whether_it_comes_before_the_end_or_after(self, nbytes: int) -> None:
        one, other = self.pair()
        calls: list[tuple[str, Any, bool]] = []
        transfer = sent(one, tensor_of("uint8", (nbytes,)))
        transfer.add_done_callback(lambda t: calls.append(("before", t, t.done())))
        received(other)
        transfer.wait(waits.patience_s)
        transfer.add_done_callback(lambda t: calls.append(("after", t, t.done())))
        until(lambda: len(calls) >= 2, what="a callback of a transfer that has ended")
        sent(one, None)  # a second callback would have been called by now
        assert received(other) is None
        assert [name for name, *_ in calls] == ["before", "after"], f"calls: {[n for n, *_ in calls]}"
        assert all(given is transfer and done for _, given, done in calls)

    @law("ALL-5")
    @pytest.mark.parametrize("nbytes", [10, 3 * MIB])
    def test_a_callback_that_raises_harms_nobody(self, nbytes: int) -> None:
        one, other = self.pair()
        called = threading.Event()
        message = tensor_of("uint8", (nbytes,))
        transfer = sent(one, message)
        try:
            transfer.add_done_callback(_raise)
        except KeyError:
            assert transfer.done(), "a callback was called before the end"  # called at once, in this thread
        transfer.add_done_callback(lambda _: called.set())
        assert_same(message, received(other))
        transfer.wait(waits.patience_s)
        until(called.is_set, what="the second callback, after one that raised,")
        sent(one, None)
        assert received(other) is None

    @law("ALL-5", "ALL-1")
    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_a_callback_may_end_the_pipe(self, end: str) -> None:
        one, other = self.pair()
        raised: list[BaseException] = []
        ended = threading.Event()

        def finish(_: Transfer) -> None:
            try:
                getattr(one, end)()
            except BaseException as e:
                raised.append(e)
            ended.set()

        transfer = sent(one, tensor_of("uint8", (3 * MIB,)))
        adding = Call(lambda: transfer.add_done_callback(finish))
        received(other)
        until(ended.is_set, what=f"the end of {end}() in a callback")
        adding.result()
        assert not raised, f"{end}() in a callback raised {raised[0]!r}"
        raises(ClosedError, lambda: one.send_tensor(None))
        raises(PeerGoneError, lambda: other.recv_tensor(timeout=waits.patience_s))

    @law("ALL-5", needs="a_limit")
    @pytest.mark.parametrize("who", ["this end", "the other end"])
    @pytest.mark.parametrize("how", ["aborts", "closes"])
    def test_every_transfer_ends_when_an_end_ends(self, how: str, who: str) -> None:
        one, other = self.limited_pair()
        called: list[Transfer] = []
        transfers = fill(one)
        for transfer in transfers:
            transfer.add_done_callback(called.append)
        waiting = [Call(lambda t=transfer: t.wait(4 * waits.patience_s)) for transfer in transfers[-3:]]  # type: ignore[misc]
        ending = one if who == "this end" else other
        Call(ending.abort if how == "aborts" else lambda: ending.close(timeout=0.1)).result()
        kind = ClosedError if who == "this end" else PeerGoneError
        _all_end(transfers, kind)
        until(lambda: len(called) >= len(transfers), what="the last callback")
        assert len(called) == len(transfers), "a callback was called twice"
        for transfer, call in zip(transfers[-3:], waiting, strict=True):
            assert call.end().error is transfer.error() or isinstance(call.error, kind), f"{call.error!r}"


def _raise(_: Transfer) -> None:
    raise KeyError("a callback of the test")


def _all_end(transfers: list[Transfer], kind: type[BaseException]) -> None:
    until(
        lambda: all(transfer.done() for transfer in transfers),
        what=f"the end of each of {len(transfers)} transfers",
    )
    for number, transfer in enumerate(transfers):
        error = transfer.error()
        assert error is None or (isinstance(error, kind) and str(error)), f"transfer {number}: {error!r}"
        if error is None:
            transfer.wait(0)
        else:
            raises(kind, lambda t=transfer: t.wait(0))  # type: ignore[misc]
