"""Transfers (laws PIPE-4 and ALL-5), a polite close (law ALL-1), and receives that time out (law PIPE-6)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import Transfer
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import Outcome
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, fill, received, sent
from kvplug_testing.waits import Call, raises, until


class Transfers(PipeSuite):
    """The transfers that ``send_tensor`` returns, and what becomes of messages under way."""

    # -- memory --------------------------------------------------------------------------------

    @law("PIPE-4")
    @pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
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
        assert_same(wanted, got, "overwriting the tensor after done() reached the peer")

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

    # -- how transfers end ---------------------------------------------------------------------

    @law("ALL-5")
    def test_a_transfer_ends_once_it_was_received_and_each_callback_is_called_once_though_one_raises(
        self,
    ) -> None:
        one, other = self.pair()
        for size in (None, 0, 3, 3 * MIB):
            calls: list[tuple[str, Any, bool]] = []
            transfer = sent(one, None if size is None else tensor_of("uint8", (size,)))
            with contextlib.suppress(KeyError):  # of one that was done already
                transfer.add_done_callback(_raise)
            transfer.add_done_callback(lambda t: calls.append(("before", t, t.done())))  # noqa: B023
            received(other)
            until(transfer.done, what=f"the end of {transfer!r}, whose message has been received,")
            assert transfer.error() is None
            Call(lambda t=transfer: (t.wait(0), t.wait())).result()  # type: ignore[misc]
            transfer.add_done_callback(lambda t: calls.append(("after", t, t.done())))  # noqa: B023
            until(lambda: len(calls) >= 2, what="a callback of a transfer that has ended")  # noqa: B023
            sent(one, None)  # a second callback would have been called by now
            assert received(other) is None
            assert calls == [("before", transfer, True), ("after", transfer, True)]

    @law("ALL-5", "ALL-1")
    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_a_callback_may_end_the_pipe(self, end: str) -> None:
        one, other = self.pair()
        ended: list[Outcome] = []
        transfer = sent(one, tensor_of("uint8", (3 * MIB,)))

        def finish(_: Transfer) -> None:
            ended.append(Outcome.of(getattr(one, end)))

        adding = Call(lambda: transfer.add_done_callback(finish))
        received(other)
        until(lambda: ended, what=f"the end of {end}() in a callback")
        adding.result()
        ended[0].result()
        raises(ClosedError, lambda: one.send_tensor(None))

    @law("ALL-5", needs="a_limit")
    @pytest.mark.parametrize("how", ["abort", "close"])
    def test_every_transfer_ends_when_its_end_ends(self, how: str) -> None:
        """General laws judge what becomes of them when the other end does."""
        one, _ = self.limited_pair()
        called: list[Transfer] = []
        transfers = fill(one)
        for transfer in transfers:
            transfer.add_done_callback(called.append)
        waiting = Call(lambda: transfers[-1].wait(4 * waits.patience_s))
        Call(one.abort if how == "abort" else lambda: one.close(timeout=0.1)).result()
        until(lambda: len(called) == len(transfers), what="the callback of each transfer")
        for transfer in transfers:
            error = transfer.error()
            assert error is None or isinstance(error, ClosedError), f"{transfer}: {error!r}"
        assert waiting.end().error is transfers[-1].error()

    # -- a polite close ------------------------------------------------------------------------

    @law("ALL-1", "ALL-2", "PIPE-1")
    def test_closing_sends_what_was_accepted_first_and_then_the_peer_is_gone(self) -> None:
        for sizes in ((3,), (16 * MIB, 5, 7 * MIB, 0, 100_000), range(50)):
            one, other = self.pair()
            messages = [None, *(tensor_of("uint8", (size,), seed=size) for size in sizes)]
            transfers = [sent(one, message) for message in messages]
            closing = Call(lambda p=one: p.close(timeout=10 * waits.patience_s))  # type: ignore[misc]
            until(lambda p=one, c=closing: p.closed or c.ended, what="closed, of a pipe that closes,")  # type: ignore[misc]
            raises(ClosedError, lambda p=one: p.recv_tensor(timeout=waits.patience_s))  # type: ignore[misc]
            for message in messages:
                assert_same(message, received(other), "after a polite close")
            closing.result()
            assert [transfer.error() for transfer in transfers if transfer.done()] == [None] * len(transfers)
            raises(PeerGoneError, lambda p=other: p.recv_tensor(timeout=waits.patience_s))  # type: ignore[misc]

    # -- receives that time out ----------------------------------------------------------------

    @law("PIPE-6", "ALL-4")
    def test_a_receive_that_times_out_before_the_first_byte_loses_nothing(self) -> None:
        one, other = self.pair()
        for number in range(4):
            out = tensor_of("int32", (4,), seed=77) if number % 2 else None
            for timeout in (0, 0.01):
                raises(TimeoutError, lambda o=out, t=timeout: other.recv_tensor(o, timeout=t))  # type: ignore[misc]
            message = tensor_of("int32", (4,), seed=number)
            Call(lambda m=message: one.send_tensor(m, timeout=0)).result()  # type: ignore[misc]
            sent(one, None)
            assert_same(message, received(other), "after receives that had timed out")
            assert received(other) is None

    @law("PIPE-6")
    @pytest.mark.parametrize("into", ["new memory", "out", "one and the other"])
    def test_a_receive_that_times_out_within_a_message_goes_on_with_it(self, into: str) -> None:
        import torch

        one, other = self.pair()
        messages = [tensor_of("uint8", (4096, 4096), seed=number) for number in range(3)]
        outs = {
            "new memory": [None],
            "out": [torch.zeros(4096, 4096, dtype=torch.uint8).t()],
            "one and the other": [None, torch.zeros(4096, 4096, dtype=torch.uint8)],
        }[into]
        sending = Call(lambda: [one.send_tensor(message) for message in messages])
        for number, message in enumerate(messages):
            call = Call(lambda: _with_short_deadlines(other, outs)).end(waits.patience_s + 20)
            if call.error is not None:  # the pipe is broken, and every later call says so
                assert isinstance(call.error, KvplugError), call.error
                again = raises(KvplugError, lambda: other.recv_tensor(timeout=waits.patience_s))
                assert not isinstance(again, TimeoutError), f"it was broken ({call.error!r}), and then waited"
                return
            lost = difference(message, call.value)
            assert not lost, f"message {number}, received with many short deadlines: {lost}"
        for transfer in sending.result():
            transfer.wait(waits.patience_s)
        raises(TimeoutError, lambda: other.recv_tensor(timeout=0.05))


def _with_short_deadlines(pipe: Any, outs: list[Any]) -> Any:
    for number in range(20_000):
        out = outs[number % len(outs)]
        try:
            return pipe.recv_tensor(out, timeout=(0.0, 0.0005, 0.002)[number % 3])
        except TimeoutError:
            if out is not None:
                out.fill_(0xAA)  # the memory belongs to the caller again
    raise AssertionError("20,000 receives in a row timed out, and a message was on its way")


def _raise(_: Transfer) -> None:
    raise KeyError("a callback of the test")
