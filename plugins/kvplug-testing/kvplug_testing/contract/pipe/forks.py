"""A process with open pipes forks: the child's are closed, the parent's continue to work (law ALL-6)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvplug import ClosedError, PeerGoneError
from kvplug.transport import Pipe, PipeListener, Transfer
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, fill, received
from kvplug_testing.waits import Call, raises


def not_closed(pipes: list[Pipe], listeners: list[PipeListener]) -> str:
    """The calls that do not raise ``ClosedError``; empty if all do. Closing and aborting must do nothing."""
    calls: dict[str, Callable[[], Any]] = {}
    for n, pipe in enumerate(pipes):
        calls[f"send_tensor of pipe {n}"] = partial(pipe.send_tensor, None, timeout=1)
        calls[f"recv_tensor of pipe {n}"] = partial(pipe.recv_tensor, timeout=1)
    for n, listener in enumerate(listeners):
        calls[f"accept of listener {n}"] = partial(listener.accept, timeout=1)
    wrong = []
    for _ in range(2):
        for name, call in calls.items():
            try:
                wrong.append(f"{name} returned {call()!r}")
            except ClosedError:
                pass
            except BaseException as e:
                wrong.append(f"{name} raised {e!r}")
        wrong += [f"pipe {n} is not closed" for n, pipe in enumerate(pipes) if not pipe.closed]
        for listener in listeners:
            listener.close()
        for pipe in pipes:
            pipe.close()
            pipe.abort()
    return "; ".join(wrong)


class Forks(PipeSuite):
    """``os.fork()`` in a process that holds pipes and listeners."""

    @law("ALL-6", needs="forked_processes")
    def test_in_a_forked_child_every_call_raises_closed_and_the_parents_pipe_goes_on(self) -> None:
        one, other = self.pair()
        end = self.endpoint()
        listener = end.listen()
        self.later(listener.close)
        assert not (wrong := in_forked_child(lambda: not_closed([one, other], [listener]))), wrong
        self._go_on(one, other)
        self._go_on(*self.join(end, listener))

    @law("ALL-6", needs="forked_processes")
    def test_a_forked_child_holds_none_of_the_descriptors(self) -> None:
        before = in_forked_child(held)
        one, other = self.pair()
        one.send_tensor(remote.content(1, 8 * MIB))  # opens all resources of the transport
        self._receive(other, 1, 8 * MIB)
        listener = self.endpoint().listen()
        self.later(listener.close)
        assert not (more := more_than(before)), f"a forked child holds {more}"
        self._go_on(one, other)

    @law("ALL-6", needs="forked_processes")
    def test_in_a_forked_child_calls_raise_closed_though_a_thread_was_inside_one(self) -> None:
        one, other = self.pair(**self.limited()) if self.limit_option else self.pair()
        transfers = fill(one) if self.limit_option else []
        end = self.endpoint()
        listener = end.listen()
        self.later(listener.close)
        receiving = Call(partial(one.recv_tensor, timeout=None))
        sending = Call(lambda: one.send_tensor(remote.content(7, MIB), timeout=None))
        accepting = Call(partial(listener.accept, timeout=None))
        assert receiving.is_blocked(0.1)
        for _ in range(5):
            assert not (wrong := in_forked_child(lambda: not_closed([one, other], [listener]))), wrong
        for transfer in transfers:
            other.recv_tensor(timeout=waits.patience_s)
            transfer.wait(waits.patience_s)
        sending.result()
        self._receive(other, 7, MIB)
        other.send_tensor(remote.content(8, 1000))
        assert not (wrong := remote.unlike(receiving.result(), 8, 1000)), wrong
        connecting = Call(partial(end.connect, listener.contact))
        for call in (accepting, connecting):
            self.later(call.result().abort)

    @law("ALL-6", "ALL-5", needs="forked_processes", level="quick")
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

    @law("ALL-6", "ALL-5", needs="forked_processes", level="quick")
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

    @law("ALL-6", needs="both_ways_and_forked_processes")
    def test_forks_under_load_disturb_neither_side(self) -> None:
        one, other = self.pair()
        here = Call(lambda: remote.exchange(one, 60, 200_000))
        there = Call(lambda: remote.exchange(other, 60, 200_000))
        count = 0
        while not (here.ended and there.ended) and count < 20:
            assert not (wrong := in_forked_child(lambda: not_closed([one, other], []))), wrong
            count += 1
        for call in (here, there):
            assert not (wrong := call.result()), wrong

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

    @law("ALL-6", "ALL-2", needs="other_and_forked_processes")
    def test_a_forked_child_of_the_peer_neither_ends_the_pipe_nor_keeps_it_open(self) -> None:
        pipe, child = self.remote_pipe(remote.fork_and_echo)
        grandchild = child.recv()
        self.later(lambda: os.kill(grandchild, signal.SIGKILL))
        pipe.send_tensor(remote.content(1, 1000))
        self._receive(pipe, 1, 1000)
        child.kill()
        raises(PeerGoneError, partial(pipe.recv_tensor, timeout=waits.patience_s))

    def _go_on(self, one: Pipe, other: Pipe) -> None:
        for number, (source, target) in enumerate([(one, other), (other, one)]):
            source.send_tensor(remote.content(number, 50_000))
            self._receive(target, number, 50_000)

    def _receive(self, pipe: Pipe, number: int, nbytes: int) -> None:
        assert not (wrong := remote.unlike(received(pipe), number, nbytes)), wrong
