"""Peers connect, die while connecting, and connect again, while other pipes work (law END-2)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial

import pytest

from kvplug import AuthenticationError, PeerGoneError
from kvplug.transport import Pipe, PipeListener
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import PipeSuite, received
from kvplug_testing.waits import Call, raises, until


class Connecting(PipeSuite):
    """One listener, and many peers that connect to it."""

    @law("END-2", "ALL-2", needs="other_processes")
    def test_after_a_peer_that_was_killed_the_same_listener_and_endpoint_take_the_next(self) -> None:
        end = self.endpoint()
        listener = end.listen()
        self.later(listener.close)
        for number in range(6):
            child = self.connecting(listener.contact, remote.hello, number)
            pipe = self.accept(listener)
            assert not (wrong := _hello(pipe, number)), wrong
            child.kill()
            raises(PeerGoneError, partial(pipe.recv_tensor, timeout=waits.patience_s))
            if number % 2:
                pipe.close()
        contact, child = self.remote_listener(remote.accept_one)
        with end.connect(contact) as pipe:
            pipe.send_tensor(remote.content(1, 1000))
            assert not (wrong := remote.unlike(received(pipe), 1, 1000)), wrong

    @law("END-2", needs="other_processes", level="long")
    @pytest.mark.parametrize("way", ["while it connects", "before it is accepted"])
    def test_a_peer_that_is_killed_before_it_is_accepted_stops_nobody_who_comes_after(self, way: str) -> None:
        self._kill_while_connecting(way, rounds=8)

    @law("END-2", level="long", needs="other_processes", timeout_s=600)
    def test_of_hundreds_of_peers_that_are_killed_while_they_connect_none_stops_the_next(self) -> None:
        self._kill_while_connecting("while it connects", rounds=200)

    def _kill_while_connecting(self, way: str, rounds: int) -> None:
        listener = self.endpoint().listen()
        self.later(listener.close)
        chance = random.Random(rounds)
        for round_ in range(rounds):
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
            receiving = Call(partial(pipe.recv_tensor, timeout=waits.patience_s))
            receiving.end(waits.patience_s + 1)
            if receiving.error is None:
                assert not (wrong := remote.unlike(receiving.value, number, 1000)), wrong
                return pipe.abort()
            receiving.raised(PeerGoneError)
            pipe.abort()
        raise AssertionError(
            "two pipes were accepted after one peer was killed, and neither is of the next one"
        )

    @law("END-2", needs="both_ways_and_other_processes")
    def test_a_pipe_works_undisturbed_while_others_come_and_are_killed(self) -> None:
        listener = self.endpoint().listen()
        self.later(listener.close)
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
            contact, child = self.remote_listener(remote.accept_one)
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

    @law("END-2", needs="other_processes")
    def test_many_peers_that_come_at_once_are_all_taken(self) -> None:
        listener = self.endpoint().listen()
        self.later(listener.close)
        count = 6
        for number in range(count):
            self.connecting(listener.contact, remote.hello, number)
        heard = set()
        for _ in range(count):
            message = received(self.accept(listener))
            heard |= {n for n in range(count) if not remote.unlike(message, n, 1000)}
        until(lambda: len(heard) == count, 0, f"of {count} peers {count - len(heard)}")


def _hello(pipe: Pipe, number: int) -> str:
    wrong = remote.unlike(received(pipe), number, 1000)
    pipe.send_tensor(None)
    return wrong
