"""Messages from another process (law PIPE-1), forked or freshly started."""

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

SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (7,), (2, 3, 4), (300, 50)]


class Processes(PipeSuite):
    """The ends are in two processes."""

    @law("PIPE-1", needs="other_processes")
    def test_every_dtype_and_shape_comes_back_from_another_process_with_its_bits(self) -> None:
        pipe, _ = self.remote_pipe(remote.echo)
        messages = [tensor_of(dtype, shape) for dtype in dtypes() for shape in SHAPES]
        for message in [*messages, None, tensor_of("bfloat16", (1000, 300)).t(), None, None]:
            pipe.send_tensor(message)
            assert_same(message, received(pipe))

    @law("PIPE-1", needs="both_ways_and_other_processes", level="long")
    @pytest.mark.parametrize("kind", ["spawned", "forked"])
    def test_order_holds_under_load_both_ways_with_another_process(self, kind: str) -> None:
        count, nbytes = 400, 60_000
        start = self.spawned_pipe if kind == "spawned" else self.remote_pipe
        pipe, child = start(remote.both_ways, count, nbytes, **self.limited(MIB) if self.limit_option else {})
        self._exchange(pipe, child, count, nbytes)

    @law("PIPE-1", level="long", needs="both_ways_and_other_processes", timeout_s=600)
    def test_order_holds_for_many_messages_both_ways(self) -> None:
        pipe, child = self.remote_pipe(remote.both_ways, 5_000, 60_000)
        self._exchange(pipe, child, 5_000, 60_000, within=300)

    def _exchange(self, pipe: Pipe, child: Any, count: int, nbytes: int, within: float | None = None) -> None:
        within = 2 * waits.patience_s if within is None else within
        wrong = Call(lambda: remote.exchange(pipe, count, nbytes)).result(within)
        assert not wrong, wrong
        assert child.recv(within) == "received"
        child.send("go")
        assert not (wrong := child.result()), f"the other end says: {wrong}"

    @law("PIPE-1", needs="other_processes")
    def test_what_is_larger_than_any_buffer_arrives_whole_from_another_process(self) -> None:
        nbytes = 40 * MIB + 3
        pipe, _ = self.remote_pipe(remote.echo)
        for number in range(2):
            transfer = pipe.send_tensor(remote.content(number, nbytes))
            assert not (wrong := remote.unlike(received(pipe), number, nbytes)), wrong
            transfer.wait(waits.patience_s)

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
