"""Order and content under load, in one process and between two (law PIPE-1)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvplug.transport import Pipe
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received
from kvplug_testing.waits import Call

_SMALL = (0, 1, 0, 7, 100, 1000, 5000)
_LARGE = (1000, 0, MIB - 1, 70_000, 4096, MIB + 1, 1, 3 * MIB)
_SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (7,), (2, 3, 4), (300, 50)]


class Order(PipeSuite):
    """Numbered messages of mixed sizes, ``None`` among them."""

    @law("PIPE-1")
    @pytest.mark.parametrize(("count", "sizes"), [(2500, _SMALL), (50, _LARGE)], ids=["small", "large"])
    def test_many_messages_arrive_once_and_in_order_also_both_ways_at_once(
        self, count: int, sizes: tuple[int, ...]
    ) -> None:
        one, other = self.pair()
        _load([(one, other), *([] if self.both_ways else [(other, one)])], count, sizes)

    @law("PIPE-1", "PIPE-2", needs="a_limit")
    def test_order_holds_where_the_sender_has_to_wait_for_room_again_and_again(self) -> None:
        one, other = self.limited_pair(10_000)
        _load([(one, other)], 2000, _SMALL)

    # -- with another process --------------------------------------------------------------------

    @law("PIPE-1", needs="other_processes")
    def test_every_dtype_shape_and_size_comes_back_from_another_process_with_its_bits(self) -> None:
        pipe, _ = self.remote_pipe(remote.echo)
        messages = [tensor_of(dtype, shape) for dtype in dtypes() for shape in _SHAPES]
        large = [remote.content(number, 40 * MIB + 3) for number in range(2)]  # more than any buffer holds
        for message in [*messages, None, tensor_of("bfloat16", (1000, 300)).t(), None, None, *large]:
            transfer = pipe.send_tensor(message)
            assert_same(message, received(pipe))
            transfer.wait(waits.patience_s)

    @law("PIPE-1", needs="both_ways_and_other_processes", level="long")
    @pytest.mark.parametrize("kind", ["spawned", "forked"])
    def test_order_holds_under_load_both_ways_with_another_process(self, kind: str) -> None:
        count, nbytes, within = 400, 60_000, 2 * waits.patience_s
        start = self.spawned_pipe if kind == "spawned" else self.remote_pipe
        pipe, child = start(remote.both_ways, count, nbytes, **self.limited(MIB) if self.limit_option else {})
        wrong = Call(lambda: remote.exchange(pipe, count, nbytes)).result(within)
        assert not wrong, wrong
        assert child.recv(within) == "received"
        child.send("go")
        assert not (wrong := child.result()), f"the other end says: {wrong}"

    @law("ALL-1", needs="other_processes")
    def test_what_was_sent_before_a_polite_close_is_received_by_another_process(self) -> None:
        sizes = [1000, 3 * MIB, 0, 10]
        pipe, child = self.remote_pipe(remote.receive, sizes)
        child.recv()
        for number, nbytes in enumerate(sizes):
            pipe.send_tensor(remote.content(number, nbytes))
        closing = Call(partial(pipe.close, timeout=waits.patience_s))
        child.send("go")
        closing.result()
        assert not (wrong := child.result()), wrong


def _numbered(number: int, sizes: tuple[int, ...]) -> Any:
    """Message ``number``: every ninth is ``None``; the others hold the number in all of their bytes."""
    import torch

    if number % 9 == 4:
        return None
    return torch.full((1 + sizes[number % len(sizes)] // 4,), number, dtype=torch.int32)


def _load(ways: list[tuple[Pipe, Pipe]], count: int, sizes: tuple[int, ...]) -> None:
    calls = [Call(partial(_send, sender, count, sizes)) for sender, _ in ways]
    calls += [Call(partial(_receive, receiver, count, sizes)) for _, receiver in ways]
    waits.until(
        lambda: all(call.ended for call in calls) or any(call.error for call in calls), 50.0, "the end"
    )
    for call in sorted(calls, key=lambda call: call.error is None):
        call.result()


def _send(pipe: Pipe, count: int, sizes: tuple[int, ...]) -> None:
    transfers = [pipe.send_tensor(_numbered(number, sizes)) for number in range(1, count + 1)]
    for transfer in transfers:
        transfer.wait(waits.patience_s)


def _receive(pipe: Pipe, count: int, sizes: tuple[int, ...]) -> None:
    for number in range(1, count + 1):
        try:
            got = pipe.recv_tensor(timeout=waits.patience_s)
        except Exception as e:
            raise AssertionError(f"message {number:,} of {count:,} never came: {e!r}") from e
        assert_same(_numbered(number, sizes), got, f"message {number:,} of {count:,}")
