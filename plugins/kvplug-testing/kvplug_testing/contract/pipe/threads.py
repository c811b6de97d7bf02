"""Threads: one sends while one receives; a second sender or receiver is refused (law PIPE-7)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvplug import ClosedError, TimeoutError
from kvplug.transport import BusyError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_filled, assert_same, difference, filled_like
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import numbered, tensor_of
from kvplug_testing.contract.pipe.suite import LIMIT, MIB, PipeSuite, fill, received, sent
from kvplug_testing.waits import Call


class Threads(PipeSuite):
    """Several threads of one process at one end."""

    @law("PIPE-7")
    def test_a_second_receiver_is_refused_and_the_first_goes_on(self) -> None:
        one, other = self.pair()
        first = _refused(
            "receiver",
            lambda: other.recv_tensor(timeout=10 * waits.patience_s),
            lambda: other.recv_tensor(timeout=0),
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
            "sender",
            lambda: one.send_tensor(message, timeout=10 * waits.patience_s),
            # As large as the first message: if that one is late, there is no room for this one either.
            lambda: one.send_tensor(refused, timeout=0),
        )
        for number in range(count):
            got = received(other)
            assert_same(numbered(number, MIB // 4), got, "a message has come that was not sent")
        first.result()
        assert_same(message, received(other), "the message of the refused sender has come")

    @law("PIPE-7", needs="both_ways_and_a_limit")
    def test_one_thread_sends_while_another_receives(self) -> None:
        one, other = self.limited_pair()
        receiving = Call(lambda: one.recv_tensor(timeout=10 * waits.patience_s))
        assert receiving.is_blocked(0.1)
        count = len(fill(one))  # the other end receives nothing meanwhile
        sending = Call(lambda: one.send_tensor(tensor_of("uint8", (LIMIT,)), timeout=10 * waits.patience_s))
        assert sending.is_blocked(0.1), f"a sender beside a receiver: {sending.error!r}"
        message = tensor_of("int32", (3,))
        sent(other, message)
        assert_same(message, receiving.result())
        for _ in range(count + 1):
            received(other)
        sending.result()

    @law("PIPE-7")
    def test_many_senders_at_once_never_mix_their_messages(self) -> None:
        one, other = self.pair()
        accepted: list[tuple[int, int]] = []
        stop = threading.Event()

        def send(sender: int) -> None:
            import torch

            number = 0
            while not stop.is_set() and number < 120:
                size = (3, 20_000, MIB // 4)[number % 3]
                message = torch.full((size,), sender * 1000 + number, dtype=torch.int32)
                try:
                    one.send_tensor(message, timeout=0.2)
                except (BusyError, TimeoutError):
                    time.sleep(0.0005)
                    continue
                accepted.append((sender, number))
                number += 1

        senders = [Call(lambda s=sender: send(s)) for sender in range(1, 5)]  # type: ignore[misc]
        got: list[tuple[int, int]] = []
        while not all(call.ended for call in senders) or len(got) < len(accepted):
            try:
                message = Call(lambda: other.recv_tensor(timeout=0.5)).result()
            except TimeoutError:
                ended = all(call.ended for call in senders)
                assert not ended, f"{len(accepted)} messages were accepted, and {len(got)} have come"
                continue
            value = int(message[0])
            if mixed := difference(filled_like(message, value), message):
                stop.set()
                raise AssertionError(f"two messages were mixed: {mixed}")
            got.append(divmod(value, 1000))
        for call in senders:
            call.result()
        assert sorted(got) == sorted(accepted), "something else has come than was accepted"
        for sender in range(1, 5):
            order = [number for who, number in got if who == sender]
            assert order == sorted(order), f"the messages of sender {sender} have come out of order"

    @law("PIPE-7")
    def test_many_receivers_at_once_get_each_message_once_and_whole(self) -> None:
        import torch

        one, other = self.pair()
        count = 200
        got: list[int] = []

        def receive() -> None:
            while len(got) < count:
                try:
                    message: Any = other.recv_tensor(timeout=0.1)
                except (BusyError, TimeoutError):
                    time.sleep(0.0005)
                    continue
                except ClosedError:
                    return
                value = int(message[0])
                assert_filled(value, message, "two messages were mixed")
                got.append(value)

        receivers = [Call(receive) for _ in range(4)]
        for number in range(count):
            sent(one, torch.full(((3, 20_000)[number % 2],), number, dtype=torch.int32))
        waits.until(
            lambda: len(got) == count or any(call.error for call in receivers),
            what=f"{count} messages at four receivers",
        )
        other.abort()
        for call in receivers:
            call.result()
        assert sorted(got) == [*range(count)], "some came twice, or never"


def _refused(who: str, first: Callable[[], Any], second: Callable[[], Any]) -> Call:
    """The first call, still blocked, after a concurrent second call was refused with BusyError."""
    waiting = Call(first)
    limit = time.monotonic() + waits.patience_s
    while time.monotonic() < limit:
        if waiting.ended and isinstance(waiting.error, BusyError):
            waiting = Call(first)  # it started while the second call was inside
        error = Call(second).end().error
        if isinstance(error, BusyError):
            assert waiting.is_blocked(0.05), f"the first {who} was disturbed: {waiting.error!r}"
            return waiting
        assert isinstance(error, TimeoutError), f"a second {who} got in: {error!r}"
        time.sleep(0.005)
    raise AssertionError(f"a second {who} waits beside the first: BusyError never came")
