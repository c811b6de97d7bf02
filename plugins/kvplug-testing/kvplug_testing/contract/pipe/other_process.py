"""The process at the other end dies, is stopped or forks in the middle of messages, and what comes of them
(laws ALL-2, ALL-3, ALL-5, ALL-6 and PIPE-6).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import Pipe, Transfer
from kvplug_testing import waits
from kvplug_testing.comparison import assert_filled
from kvplug_testing.contract.base import law
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.contract.general import HEARTBEAT_S
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received
from kvplug_testing.waits import Call, raises, until

LARGE = 24 * MIB
"""More than the operating system and any buffer hold: a stopped peer has sent only a part of it."""
_SIZES = (0, 100, 70_000, 3 * MIB, LARGE)
"""Of messages during which a peer is killed."""
_KILLS = 12
_CUT_BYTES = 3 * MIB
"""A message so large that some of the kills interrupt it."""


class OtherProcess(PipeSuite):
    """Deaths, stops and forks. The general laws judge what calls raise; this, what comes of messages."""

    # -- death -----------------------------------------------------------------------------------

    @law("ALL-5", needs="other_processes")
    @pytest.mark.parametrize("nbytes", [100, LARGE])
    def test_every_transfer_ends_when_the_peer_is_killed_and_whoever_waits_gets_its_error(
        self, nbytes: int
    ) -> None:
        pipe, child = self.remote_pipe(remote.wait)
        child.recv()
        transfers = [pipe.send_tensor(remote.content(n, nbytes)) for n in range(2)]
        called: list[Transfer] = []
        for transfer in transfers:
            transfer.add_done_callback(called.append)
        waiting = [Call(transfer.wait) for transfer in transfers]
        child.kill()
        for call, transfer in zip(waiting, transfers, strict=True):
            until(transfer.done, what=f"the end of {transfer}")
            assert transfer.error() is None or isinstance(transfer.error(), PeerGoneError), transfer
            error = call.end().error
            assert error is transfer.error(), f"{transfer} ended, and the waiting call got {error!r}"
        until(lambda: len(called) == len(transfers), what="the callback of each transfer")

    @law("ALL-2", "ALL-5", needs="other_processes")
    def test_a_close_that_is_still_sending_ends_when_the_peer_is_killed(self) -> None:
        pipe, child = self.remote_pipe(remote.wait)
        child.recv()
        transfer = pipe.send_tensor(remote.content(1, 40 * MIB))
        closing = Call(partial(pipe.close, timeout=10 * waits.patience_s))
        closing.is_blocked(0.05)
        child.kill()
        closing.result()
        assert transfer.done(), "the pipe is closed, and a transfer is still under way"

    @law("ALL-2", needs="other_processes", level="long", timeout_s=120)
    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_of_a_message_in_which_the_peer_is_killed_nothing_is_received(
        self, nbytes: int, tmp_path: Path
    ) -> None:
        """Kills at many positions in the message, with a receiver that is reading it and without one."""
        count, chance, cut = tmp_path / "begun", random.Random(nbytes), 0
        for round_ in range(_KILLS):
            count.write_bytes(bytes(8))
            singly = round_ % 8 >= 4
            pipe, child = self.remote_pipe(remote.send_without_end, nbytes, str(count), singly)
            child.recv()
            if round_ % 2:  # no receiver: the peer is blocked in the middle of a message
                until(partial(_number_in, count), what="the first message of a peer")
                time.sleep(chance.uniform(0, 0.03))
                child.kill()
            else:
                threading.Timer(chance.uniform(0, 0.03), os.kill, (child.pid, signal.SIGKILL)).start()
            came = _receive_until_gone(pipe, nbytes, with_out=round_ % 4 >= 2)
            child.wait()
            begun = _number_in(count)
            assert came <= begun, f"{came} messages came of a peer that had begun {begun}"
            cut += singly and came < begun  # otherwise the last one may not have been sent yet
            _assert_gone(pipe)
            pipe.abort()
            child.close()
        assert cut or nbytes < _CUT_BYTES, f"of {_KILLS} kills none has cut a message of {nbytes:,} bytes"

    # -- a stop ----------------------------------------------------------------------------------

    @law("PIPE-6", "ALL-3", needs="other_processes", level="long")
    @pytest.mark.parametrize(("first_out", "second_out"), [(False, True), (True, False), (True, True)])
    def test_a_receive_that_runs_out_of_time_in_a_message_of_a_stopped_peer_is_not_skipped(
        self, first_out: bool, second_out: bool
    ) -> None:
        import torch

        sizes = [1000, LARGE, 2000, 3000]
        pipe, child = self.remote_pipe(remote.send, sizes, heartbeat_timeout_s=HEARTBEAT_S)
        _receive(pipe, 0, 1000)
        assert child.recv() == "queued"
        child.stop()
        out = torch.zeros(LARGE, dtype=torch.uint8) if first_out else None
        receiving = Call(partial(pipe.recv_tensor, out, timeout=2 * HEARTBEAT_S)).end()
        is_late = receiving.error is not None
        if is_late:
            receiving.raised(TimeoutError)
            if out is not None:
                out.fill_(99)  # the memory belongs to the caller again
        else:  # the whole message had already arrived
            assert not (wrong := remote.unlike(receiving.value, 1, LARGE)), wrong
        child.cont()
        self._rest(pipe, sizes, 1 if is_late else 2, second_out)
        if out is not None and is_late:
            assert_filled(99, out, "memory was written to after its call had ended")

    def _rest(self, pipe: Pipe, sizes: Sequence[int], number: int, with_out: bool) -> None:
        """The remaining messages arrive, or the pipe is broken and reports it."""
        import torch

        for each in range(number, len(sizes)):
            out = torch.zeros(sizes[each], dtype=torch.uint8) if with_out else None
            within = waits.patience_s
            receiving = Call(partial(pipe.recv_tensor, out, timeout=within)).end(within + 1)
            if receiving.error is not None:
                assert each == number, f"message {each} was lost: {receiving.error!r}"
                error = receiving.error
                assert isinstance(error, KvplugError), f"not an error of kvplug: {error!r}"
                assert not isinstance(error, TimeoutError), "the peer went on, and the rest did not come"
                again = raises(KvplugError, partial(pipe.recv_tensor, timeout=within))
                assert not isinstance(again, TimeoutError), f"a pipe that was broken ({error}) waits: {again}"
                return
            assert not (wrong := remote.unlike(receiving.value, each, sizes[each])), wrong

    # -- forks -----------------------------------------------------------------------------------

    @law("ALL-6", "ALL-5", needs="forked_processes", level="long")
    def test_transfers_under_way_have_failed_in_a_forked_child_and_go_on_in_the_parent(self) -> None:
        one, other = self.pair()
        sizes = [40 * MIB, 1000, 2 * MIB]
        transfers = [one.send_tensor(remote.content(n, nbytes)) for n, nbytes in enumerate(sizes)]
        called: list[int] = []
        for transfer in transfers:
            transfer.add_done_callback(lambda _: called.append(os.getpid()))
        waiting = [Call(transfer.wait) for transfer in transfers]

        def look() -> str:
            wrong = []
            for number, transfer in enumerate(transfers):
                try:
                    transfer.wait(1)
                except ClosedError:
                    pass
                except BaseException as e:
                    wrong.append(f"waiting for transfer {number} raised {e!r}")
                if not transfer.done():
                    wrong.append(f"transfer {number} is under way")
            if os.getpid() in called:
                wrong.append("a callback of the parent's was called")
            return "; ".join(wrong)

        for _ in range(5):
            assert not (wrong := in_forked_child(look)), f"in a forked child {wrong}"
        for number, nbytes in enumerate(sizes):
            _receive(other, number, nbytes)
        for call in waiting:
            call.result()

    @law("ALL-6", "ALL-5", needs="forked_processes", level="long")
    def test_no_transfer_is_under_way_in_a_forked_child_also_if_a_thread_was_ending_it(self) -> None:
        if sys.gettrace() is not None:
            pytest.skip("a tracer, such as coverage's, has a lock that a forked child may inherit taken")
        one, other = self.pair()
        transfers: list[Transfer] = []

        def send_all() -> None:
            with contextlib.suppress(ClosedError, PeerGoneError):
                while True:
                    message = remote.content(len(transfers), 50_000)
                    transfers.append(one.send_tensor(message, timeout=None))

        def receive_all() -> None:
            with contextlib.suppress(ClosedError, PeerGoneError):
                while True:
                    other.recv_tensor(timeout=None)

        def look() -> str:
            wrong = [number for number, transfer in enumerate(transfers) if not transfer.done()]
            return f"{len(wrong)} transfers are under way, the first is number {wrong[0]}" if wrong else ""

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # so that threads are anywhere when this one forks
        try:
            working = [Call(send_all), Call(receive_all)]
            for _ in range(10):
                assert not (wrong := in_forked_child(look)), f"in a forked child {wrong}"
                assert not working[0].ended, working[0].error or working[0].value
        finally:
            sys.setswitchinterval(interval)
            one.abort()
        for call in working:
            call.result()

    @law("ALL-6", needs="other_and_forked_processes")
    def test_a_forked_child_connects_anew_and_the_pipe_it_inherited_stays_its_parents(self) -> None:
        one, other = self.pair()
        listener = self.endpoint().listen()
        self.later(listener.close)
        contact = listener.contact

        def connect() -> str:
            with self.endpoint().connect(contact, timeout=waits.patience_s) as pipe:
                pipe.send_tensor(remote.content(3, 1000))
                return remote.unlike(pipe.recv_tensor(timeout=waits.patience_s), 4, 1000)

        child = Call(lambda: in_forked_child(connect))
        pipe = self.accept(listener)
        _receive(pipe, 3, 1000)
        pipe.send_tensor(remote.content(4, 1000))
        assert not (wrong := child.result(2 * waits.patience_s)), wrong
        for number, (source, target) in enumerate([(one, other), (other, one)]):
            source.send_tensor(remote.content(number, 50_000))
            _receive(target, number, 50_000)


def _receive(pipe: Pipe, number: int, nbytes: int) -> None:
    assert not (wrong := remote.unlike(received(pipe), number, nbytes)), wrong


def _receive_until_gone(pipe: Pipe, nbytes: int, with_out: bool) -> int:
    """The number of messages received before the peer is gone; each must be complete."""
    import torch

    number = 0
    while True:
        out = torch.zeros(nbytes, dtype=torch.uint8) if with_out else None
        receiving = Call(partial(pipe.recv_tensor, out, timeout=waits.patience_s))
        if isinstance(receiving.end(waits.patience_s + 1).error, PeerGoneError):
            return number
        wrong = remote.unlike(receiving.result(), number, nbytes)
        assert not wrong, f"the peer was killed, and then {wrong}"
        number += 1


def _assert_gone(pipe: Pipe) -> None:
    """Every call raises, also repeatedly. Before the death is detected, sends may succeed."""

    def send_until_gone() -> None:
        limit = time.monotonic() + waits.patience_s
        while time.monotonic() < limit:
            pipe.send_tensor(None, timeout=waits.patience_s)
            time.sleep(0.001)

    for _ in range(2):
        raises(PeerGoneError, partial(pipe.recv_tensor, timeout=waits.patience_s))
        raises(PeerGoneError, send_until_gone)
    raises(PeerGoneError, partial(pipe.send_tensor, None, timeout=waits.patience_s))


def _number_in(count: Path) -> int:
    return int.from_bytes(count.read_bytes(), "little")
