"""Peers connect, die or stop while connecting, and connect again, while other pipes work (law END-2)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial

import pytest

from kvplug import AuthenticationError, PeerGoneError, TimeoutError
from kvplug.transport import Pipe, PipeListener
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import PipeSuite, received
from kvplug_testing.waits import Call, raises, until


class Connecting(PipeSuite):
    """One listener, and peers in other processes that connect to it."""

    def _listen(self) -> PipeListener:
        listener = self.endpoint().listen()
        self.later(listener.close)
        return listener

    @law("END-2", "ALL-2", needs="other_processes")
    def test_after_a_peer_that_was_killed_the_same_listener_takes_the_next(self) -> None:
        listener = self._listen()
        for number in range(4):
            child = self.connecting(listener.contact, remote.hello, number)
            pipe = self.accept(listener)
            assert not (wrong := _hello(pipe, number)), wrong
            child.kill()
            raises(PeerGoneError, partial(pipe.recv_tensor, timeout=waits.patience_s))
            if number % 2:
                pipe.close()

    @law("END-2", needs="other_processes", level="long")
    @pytest.mark.parametrize("way", ["while it connects", "before it is accepted"])
    def test_a_peer_that_is_killed_before_it_is_accepted_stops_nobody_who_comes_after(self, way: str) -> None:
        listener = self._listen()
        chance = random.Random(1)
        for round_ in range(12):
            dying = self.connecting(listener.contact, remote.wait)
            if way == "before it is accepted":
                dying.recv()
            else:
                time.sleep(chance.uniform(0, 0.03))
            dying.kill()
            dying.close()
            child = self.connecting(listener.contact, remote.hello, round_)
            self._find(listener, round_)
            child.close()

    def _find(self, listener: PipeListener, number: int) -> None:
        """Accept until the live peer is found; the pipe of a dead peer reports its death at once."""
        for _ in range(2):
            pipe = self.accept(listener)
            within = waits.patience_s
            receiving = Call(partial(pipe.recv_tensor, timeout=within)).end(within + 1)
            if receiving.error is None:
                assert not (wrong := remote.unlike(receiving.value, number, 1000)), wrong
                return pipe.abort()
            receiving.raised(PeerGoneError)
            pipe.abort()
        raise AssertionError("a peer was killed, and neither of two accepted pipes is of the next one")

    @law("END-2", needs="both_ways_and_other_processes")
    def test_a_pipe_works_undisturbed_while_others_come_and_are_killed(self) -> None:
        listener = self._listen()
        working = self.connecting(listener.contact, remote.both_ways, 200, 100_000)
        pipe = self.accept(listener)
        exchanging = Call(lambda: remote.exchange(pipe, 200, 100_000))
        for number in range(5):
            child = self.connecting(listener.contact, remote.hello, number)
            if number % 2:
                assert not (wrong := _hello(self.accept(listener), number)), wrong
            child.kill()
        assert not (wrong := exchanging.result(2 * waits.patience_s)), wrong
        working.recv()
        working.send("go")
        assert not (wrong := working.result()), wrong

    @law("END-2", "ALL-2", needs="other_processes")
    def test_connecting_to_a_listener_that_is_killed_meanwhile_ends(self) -> None:
        end = self.endpoint()
        chance = random.Random(1)
        for round_ in range(8):
            contact, child = self.remote_listener(remote.accept_without_end)
            child.send("accept")
            if round_:
                threading.Timer(chance.uniform(0, 0.01), os.kill, (child.pid, signal.SIGKILL)).start()
            else:
                child.kill()
            connecting = Call(partial(end.connect, contact, timeout=waits.patience_s))
            connecting.end(waits.patience_s / 2)
            if connecting.error is None:
                self.later(connecting.value.abort)
                raises(PeerGoneError, partial(connecting.value.recv_tensor, timeout=waits.patience_s))
            else:
                # If the listener must authenticate first, one that hangs up has not done so.
                assert isinstance(connecting.error, PeerGoneError | AuthenticationError), connecting.error
            child.wait()
            child.close()

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
        assert not (wrong := remote.unlike(received(pipe), 1, 1000)), wrong

    @law("END-2", "ALL-3", needs="other_processes")
    def test_a_peer_that_is_stopped_while_it_connects_holds_up_nobody(self) -> None:
        for moment in (0.0, 0.004, 0.012):
            with self.scope():
                listener = self._listen()
                slow = self.connecting(listener.contact, remote.hello, 1)
                time.sleep(moment)
                slow.stop()
                self.connecting(listener.contact, remote.hello, 2)
                came: list[int] = []
                Call(partial(self._take_two, listener, came))
                until(lambda: 2 in came, what="the message of a peer that came after one that is stopped")  # noqa: B023

    def _take_two(self, listener: PipeListener, came: list[int]) -> None:
        def receive(pipe: Pipe) -> None:
            message = pipe.recv_tensor(timeout=None)
            came.append(1 if remote.unlike(message, 2, 1000) else 2)

        for _ in range(2):
            pipe = listener.accept(timeout=None)
            self.later(pipe.abort)
            Call(partial(receive, pipe))


def _hello(pipe: Pipe, number: int) -> str:
    wrong = remote.unlike(received(pipe), number, 1000)
    pipe.send_tensor(None)
    return wrong
