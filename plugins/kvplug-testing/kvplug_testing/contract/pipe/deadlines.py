"""Deadlines (law ALL-4), and the state after a receive that timed out (law PIPE-6)."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug import KvplugError, TimeoutError
from kvplug.transport import Pipe
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import PipeSuite, received, sent
from kvplug_testing.waits import Call, raises

_EARLY_S = 0.05
"""How much too early a call may time out: more than the error of reading a clock."""


class Deadlines(PipeSuite):
    """Every call that can block."""

    @law("ALL-4")
    def test_no_time_is_enough_for_what_is_there(self) -> None:
        one, other = self.pair()
        message = tensor_of("int32", (3,))
        Call(lambda: one.send_tensor(message, timeout=0)).result()
        waits.until(lambda: _try(other), what="a small message that was sent")
        sent(one, message)
        assert_same(message, received(other))

    @law("ALL-4")
    def test_connecting_ends_in_time_also_with_no_time(self) -> None:
        end = self.endpoint()
        listener = end.listen()
        self.later(listener.close)
        call = Call(lambda: end.connect(listener.contact, timeout=0)).end()
        if isinstance(call.value, Pipe):
            self.later(call.value.abort)
        else:
            call.raised(TimeoutError)

    @law("ALL-4", needs="a_silent_contact")
    def test_connecting_to_somebody_who_does_not_answer_ends_at_its_deadline(self) -> None:
        contact = self.silent_contact()
        for timeout in (0, 0.3):
            call = Call(lambda t=timeout: self.endpoint().connect(contact, timeout=t))  # type: ignore[misc]
            error = call.raised(TimeoutError)
            assert call.took_s >= timeout - _EARLY_S, (
                f"connect gave up after {call.took_s:.3f} s of {timeout}"
            )
            assert len(str(error)) > 10, f"connect does not say what it waited for: {error!r}"

    # -- the state after a receive that timed out ----------------------------------------------

    @law("PIPE-6")
    def test_a_receive_that_times_out_before_the_first_byte_loses_nothing(self) -> None:
        one, other = self.pair()
        for number in range(10):
            out = tensor_of("int32", (4,), seed=77) if number % 2 else None
            for timeout in (0, 0.01):
                raises(TimeoutError, lambda o=out, t=timeout: other.recv_tensor(o, timeout=t))  # type: ignore[misc]
            messages = [tensor_of("int32", (4,), seed=number), None]
            for message in messages:
                sent(one, message)
            for message in messages:
                lost = difference(message, received(other))
                assert not lost, f"after receives that had timed out: {lost}"

    @law("PIPE-6")
    @pytest.mark.parametrize("into", ["new memory", "out", "out that is not contiguous", "one and the other"])
    def test_a_receive_that_times_out_within_a_message_goes_on_with_it(self, into: str) -> None:
        import torch

        one, other = self.pair()
        messages = [tensor_of("uint8", (4096, 4096), seed=number) for number in range(3)]
        outs = {
            "new memory": [None],
            "out": [torch.zeros(4096, 4096, dtype=torch.uint8)],
            "out that is not contiguous": [torch.zeros(4096, 4096, dtype=torch.uint8).t()],
            "one and the other": [None, torch.zeros(4096, 4096, dtype=torch.uint8)],
        }[into]
        sending = Call(lambda: [one.send_tensor(message) for message in messages])
        for number, message in enumerate(messages):
            call = Call(lambda: _with_short_deadlines(other, outs)).end(waits.patience_s + 20)
            if call.error is not None:
                _is_broken(other, call.error)
                return
            lost = difference(message, call.value)
            assert not lost, f"message {number}, received with many short deadlines: {lost}"
        for transfer in sending.result():
            transfer.wait(waits.patience_s)
        raises(TimeoutError, lambda: other.recv_tensor(timeout=0.05))


def _with_short_deadlines(pipe: Pipe, outs: list[Any]) -> Any:
    for number in range(20_000):
        out = outs[number % len(outs)]
        try:
            return pipe.recv_tensor(out, timeout=(0.0, 0.0005, 0.002)[number % 3])
        except TimeoutError:
            if out is not None:
                out.fill_(0xAA)  # the memory belongs to the caller again
    raise AssertionError("20,000 receives in a row timed out, and a message was on its way")


def _is_broken(pipe: Pipe, error: BaseException) -> None:
    """Check the alternative that the law allows: the pipe is broken, and every later call reports it."""
    if isinstance(error, AssertionError) or not isinstance(error, KvplugError):
        raise error
    again = raises(KvplugError, lambda: pipe.recv_tensor(timeout=waits.patience_s))
    assert not isinstance(again, TimeoutError), f"it was broken ({error!r}), and then waited"


def _try(pipe: Pipe) -> bool:
    """Whether a message can be received at once."""
    try:
        Call(lambda: pipe.recv_tensor(timeout=0)).result()
    except TimeoutError:
        return False
    return True
