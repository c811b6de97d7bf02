"""The process at the other end is stopped and resumed: it is alive (laws ALL-3, PIPE-3, PIPE-6)."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from kvplug import KvplugError, TimeoutError
from kvplug.transport import Pipe
from kvplug_testing import waits
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.content import numbered
from kvplug_testing.contract.pipe.suite import LIMIT, MIB, MOST_ACCEPTED, PipeSuite, received
from kvplug_testing.waits import Call, raises, until

HEARTBEAT_S = 0.5
"""``heartbeat_timeout_s`` of a peer that is stopped for longer: it must have no effect on this host."""
LARGE = 24 * MIB
"""More than the operating system and any buffer hold: a stopped peer has sent only a part of it."""


class SigStop(PipeSuite):
    """The process at the other end receives SIGSTOP and SIGCONT."""

    @law("PIPE-3", "ALL-3", needs="bounded_and_other_processes", level="long")
    @pytest.mark.parametrize("nbytes", [1000, 100_000, 3 * MIB])
    def test_with_the_peer_stopped_no_more_is_taken_than_the_limit_and_nothing_is_lost(
        self, nbytes: int
    ) -> None:
        pipe, child = self.remote_pipe(remote.echo, heartbeat_timeout_s=HEARTBEAT_S, **self.limited())
        child.stop()
        most = LIMIT + nbytes + self.beyond_limit_bytes
        taken = 0

        def clog() -> int:
            count = 0
            while (count + 1) * nbytes <= min(most + 8 * MIB, MOST_ACCEPTED):
                try:
                    pipe.send_tensor(numbered(count, nbytes), timeout=0.3)
                except TimeoutError:
                    break
                count += 1
            return count

        taken = Call(clog).result(waits.patience_s + 10)
        assert taken * nbytes <= most, f"{taken * nbytes:,} bytes were taken for a stopped peer, not {most:,}"
        child.cont()
        for number in range(taken):
            assert_same(numbered(number, nbytes), received(pipe), f"message {number}")

    @law("PIPE-6", "ALL-3", needs="other_processes", level="long")
    @pytest.mark.parametrize("first_out", [False, True])
    @pytest.mark.parametrize("second_out", [False, True])
    def test_a_receive_that_runs_out_of_time_in_a_message_of_a_stopped_peer_is_not_skipped(
        self, first_out: bool, second_out: bool
    ) -> None:
        sizes = [1000, LARGE, 2000, 3000]
        pipe, child = self.remote_pipe(remote.send, sizes, heartbeat_timeout_s=HEARTBEAT_S)
        _receive(pipe, 0, 1000)
        assert child.recv() == "queued"
        child.stop()
        out = _memory(LARGE) if first_out else None
        receiving = Call(partial(pipe.recv_tensor, out, timeout=2 * HEARTBEAT_S)).end()
        number = 1
        if receiving.error is None:  # the whole message had already arrived
            assert not (wrong := remote.unlike(receiving.value, number, LARGE)), wrong
            number += 1
        else:
            receiving.raised(TimeoutError)
            if out is not None:
                out.fill_(99)  # the memory belongs to the caller again
        child.cont()
        self._rest(pipe, sizes, number, second_out)
        if out is not None and number == 1:
            assert_filled(99, out, "memory was written to after its call had ended")

    @law("PIPE-6", needs="other_processes", level="long")
    def test_a_receive_that_runs_out_of_time_again_and_again_is_not_skipped(self) -> None:
        sizes = [LARGE, 1000, LARGE // 2, 2000]
        pipe, child = self.remote_pipe(remote.send, sizes)
        limit = time.monotonic() + waits.patience_s
        number = 0
        while number < len(sizes):
            # The peer runs briefly between stops, and sends a part of a message each time.
            child.stop()
            receiving = Call(partial(pipe.recv_tensor, timeout=0.02)).end()
            child.cont()
            if receiving.error is None:
                assert not (wrong := remote.unlike(receiving.value, number, sizes[number])), wrong
                number += 1
            elif not isinstance(receiving.error, TimeoutError):
                return self._assert_broken(pipe, receiving.error)
            if time.monotonic() > limit:
                break
            time.sleep(0.002)
        self._rest(pipe, sizes, number)
        return None

    def _rest(self, pipe: Pipe, sizes: list[int], number: int, with_out: bool = False) -> None:
        """All messages from ``number`` on arrive complete; or the pipe is broken and every call says so."""
        for each in range(number, len(sizes)):
            out = _memory(sizes[each]) if with_out else None
            receiving = Call(partial(pipe.recv_tensor, out, timeout=waits.patience_s))
            receiving.end(waits.patience_s + 1)
            if receiving.error is not None and each == number:
                return self._assert_broken(pipe, receiving.error)
            assert not (wrong := remote.unlike(receiving.result(), each, sizes[each])), wrong
        return None

    def _assert_broken(self, pipe: Pipe, error: BaseException) -> None:
        assert isinstance(error, KvplugError), f"not an error of kvplug: {error!r}"
        assert not isinstance(error, TimeoutError), "the rest of a message did not come when the peer went on"
        again = raises(KvplugError, partial(pipe.recv_tensor, timeout=waits.patience_s))
        assert not isinstance(again, TimeoutError), f"a pipe that was broken ({error}) waits: {again}"

    @law("ALL-3", "ALL-4", needs="other_processes")
    def test_connecting_to_a_stopped_listener_ends_in_time_and_succeeds_when_it_goes_on(self) -> None:
        contact, child = self.remote_listener(remote.accept_without_end)
        for _ in range(2):  # it may accept the peer that gave up
            child.send("accept")
        child.stop()
        end = self.endpoint()
        connecting = Call(partial(end.connect, contact, timeout=0.5)).end()
        if connecting.error is None:  # the kernel completed the connection
            pipe = connecting.value
            self.later(pipe.abort)
            raises(TimeoutError, partial(pipe.recv_tensor, timeout=0.2))
            child.cont()
        else:
            connecting.raised(TimeoutError)
            child.cont()
            within = waits.patience_s
            pipe = Call(partial(end.connect, contact, timeout=within)).result(within + 1)
            self.later(pipe.abort)
        pipe.send_tensor(remote.content(1, 1000), timeout=waits.patience_s)
        _receive(pipe, 1, 1000)

    @law("END-2", "ALL-3", needs="other_processes")
    @pytest.mark.parametrize("moment", range(5))
    def test_a_peer_that_is_stopped_while_it_connects_holds_up_nobody(self, moment: int) -> None:
        listener = self.endpoint().listen()
        self.later(listener.close)
        slow = self.connecting(listener.contact, remote.hello, 1)
        time.sleep(0.004 * moment)
        slow.stop()
        self.connecting(listener.contact, remote.hello, 2)
        heard: list[int] = []

        def hear(pipe: Pipe) -> None:
            message = pipe.recv_tensor(timeout=None)
            heard.append(1 if remote.unlike(message, 2, 1000) else 2)

        def take() -> None:
            for _ in range(2):
                pipe = listener.accept(timeout=None)
                self.later(pipe.abort)
                Call(partial(hear, pipe))

        Call(take)
        until(lambda: 2 in heard, what="the message of a peer that came after one that is stopped")

    @property
    def bounded_and_other_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.a_limit or self.other_processes


def _receive(pipe: Pipe, number: int, nbytes: int) -> None:
    assert not (wrong := remote.unlike(received(pipe), number, nbytes)), wrong


def _memory(nbytes: int) -> Any:
    import torch

    return torch.zeros(nbytes, dtype=torch.uint8)
