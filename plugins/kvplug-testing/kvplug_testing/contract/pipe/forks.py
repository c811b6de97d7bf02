"""A process with open pipes forks: the child's are closed, the parent's continue to work (law ALL-6)."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

from kvplug import ClosedError, PeerGoneError
from kvplug.transport import Pipe, Transfer
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received
from kvplug_testing.waits import Call


class Forks(PipeSuite):
    """``os.fork()`` in a process that holds pipes and listeners."""

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
            self._receive(other, number, nbytes)
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
            sending, receiving = Call(send_all), Call(receive_all)
            for _ in range(10):
                assert not (wrong := in_forked_child(look)), f"in a forked child {wrong}"
                assert not sending.ended, sending.error or sending.value
        finally:
            sys.setswitchinterval(interval)
            one.abort()
        sending.result()
        receiving.result()

    @law("ALL-6", needs="other_and_forked_processes")
    def test_a_forked_child_connects_anew_and_the_pipe_it_inherited_stays_its_parents(self) -> None:
        one, other = self.pair()
        end = self.endpoint()
        listener = end.listen()
        self.later(listener.close)
        contact = listener.contact

        def connect() -> str:
            with self.endpoint().connect(contact, timeout=waits.patience_s) as pipe:
                pipe.send_tensor(remote.content(3, 1000))
                return remote.unlike(pipe.recv_tensor(timeout=waits.patience_s), 4, 1000)

        child = Call(lambda: in_forked_child(connect))
        pipe = self.accept(listener)
        self._receive(pipe, 3, 1000)
        pipe.send_tensor(remote.content(4, 1000))
        assert not (wrong := child.result(2 * waits.patience_s)), wrong
        self._go_on(one, other)

    def _go_on(self, one: Pipe, other: Pipe) -> None:
        for number, (source, target) in enumerate([(one, other), (other, one)]):
            source.send_tensor(remote.content(number, 50_000))
            self._receive(target, number, 50_000)

    def _receive(self, pipe: Pipe, number: int, nbytes: int) -> None:
        assert not (wrong := remote.unlike(received(pipe), number, nbytes)), wrong
