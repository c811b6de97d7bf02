"""Order under load (law PIPE-1): thousands of numbered messages in both directions at once."""

from __future__ import annotations

from typing import Any

from kvplug.transport import Pipe
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite
from kvplug_testing.waits import Call

_SMALL = (0, 1, 0, 7, 100, 1000, 5000)
_LARGE = (1000, 0, MIB - 1, 70_000, 4096, MIB + 1, 1, 3 * MIB)


class Order(PipeSuite):
    """Both ends send numbered messages of mixed sizes, ``None`` among them, and receive them."""

    @law("PIPE-1")
    def test_thousands_of_messages_arrive_once_and_in_order(self) -> None:
        one, other = self.pair()
        _load([(one, other)], 3000, _SMALL)

    @law("PIPE-1", needs="both_ways")
    def test_thousands_of_messages_arrive_once_and_in_order_both_ways_at_once(self) -> None:
        one, other = self.pair()
        _load([(one, other), (other, one)], 2500, _SMALL)

    @law("PIPE-1", needs="both_ways")
    def test_large_and_small_messages_arrive_in_order_both_ways_at_once(self) -> None:
        one, other = self.pair()
        _load([(one, other), (other, one)], 50, _LARGE)

    @law("PIPE-1", needs="a_limit")
    def test_order_holds_where_the_sender_has_to_wait_for_room_again_and_again(self) -> None:
        one, other = self.limited_pair(10_000)
        _load([(one, other)], 2000, _SMALL)

    @law("PIPE-1", level="long", needs="both_ways", timeout_s=300.0)
    def test_a_hundred_thousand_messages_arrive_in_order_both_ways_at_once(self) -> None:
        one, other = self.pair()
        _load([(one, other), (other, one)], 100_000, _SMALL, within=250.0)

    @law("PIPE-1", level="long", needs="both_ways", timeout_s=300.0)
    def test_a_thousand_large_and_small_messages_arrive_in_order_both_ways_at_once(self) -> None:
        one, other = self.pair()
        _load([(one, other), (other, one)], 1000, _LARGE, within=250.0)


def numbered(number: int, sizes: tuple[int, ...]) -> Any:
    """Message ``number``: every ninth is ``None``; the others hold the number in all of their bytes."""
    import torch

    if number % 9 == 4:
        return None
    return torch.full((1 + sizes[number % len(sizes)] // 4,), number, dtype=torch.int32)


def _load(ways: list[tuple[Pipe, Pipe]], count: int, sizes: tuple[int, ...], within: float = 50.0) -> None:
    calls = [Call(lambda s=sender: _send(s, count, sizes)) for sender, _ in ways]  # type: ignore[misc]
    calls += [Call(lambda r=receiver: _receive(r, count, sizes)) for _, receiver in ways]  # type: ignore[misc]
    waits.until(lambda: all(call.ended or call.error for call in calls) or _failed(calls), within, "the end")
    for call in sorted(calls, key=lambda call: call.error is None):
        call.result()


def _failed(calls: list[Call]) -> bool:
    return any(call.error is not None for call in calls)


def _send(pipe: Pipe, count: int, sizes: tuple[int, ...]) -> None:
    transfers = [pipe.send_tensor(numbered(number, sizes)) for number in range(1, count + 1)]
    for transfer in transfers:
        transfer.wait(waits.patience_s)


def _receive(pipe: Pipe, count: int, sizes: tuple[int, ...]) -> None:
    for number in range(1, count + 1):
        try:
            got = pipe.recv_tensor(timeout=waits.patience_s)
        except Exception as e:
            raise AssertionError(f"message {number:,} of {count:,} never came: {e!r}") from e
        wanted = numbered(number, sizes)
        assert_same(wanted, got, f"message {number:,} of {count:,}")
