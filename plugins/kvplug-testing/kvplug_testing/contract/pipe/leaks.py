"""Peers and messages come and go, and leave no resource (law ALL-7).

Measured in this process and in the other one, which continues to run: descriptors, threads, children, names
of sockets and of shared memory must be exactly the same after the rounds as before. For memory,
:class:`~kvplug_testing.contract.pipe.footprint.Footprint` defines what counts as growth. The first rounds are
not measured: they fill caches and allocators.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvplug import PeerGoneError
from kvplug.transport import Pipe
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.footprint import Footprint
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received
from kvplug_testing.waits import Call, raises

WARM_UP = 10
NBYTES = MIB
"""Size of the message of a round."""


class Leaks(PipeSuite):
    """Many equal rounds."""

    @law("ALL-7", needs="other_processes", level="quick")
    def test_peers_that_come_and_end_or_are_killed_leave_nothing(self) -> None:
        self._come_and_go(20)

    @law("ALL-7", level="full", needs="other_processes", timeout_s=900)
    def test_a_thousand_peers_that_come_and_end_or_are_killed_leave_nothing(self) -> None:
        self._come_and_go(1000)

    @law("ALL-7", needs="other_processes")
    def test_pipes_to_a_peer_that_lives_on_leave_nothing_here_nor_there(self) -> None:
        self._connect_again_and_again(20)

    @law("ALL-7", level="full", needs="other_processes", timeout_s=900)
    def test_a_thousand_pipes_to_a_peer_that_lives_on_leave_nothing_here_nor_there(self) -> None:
        self._connect_again_and_again(1000)

    @law("ALL-7")
    def test_pairs_of_this_process_leave_nothing(self) -> None:
        self._meet_again_and_again(20)

    @law("ALL-7", level="full", timeout_s=300)
    def test_a_thousand_pairs_of_this_process_leave_nothing(self) -> None:
        self._meet_again_and_again(1000)

    @law("ALL-7", needs="other_processes")
    def test_messages_that_came_and_went_leave_nothing_here_nor_there(self) -> None:
        """Enough messages that a leak of each of them is visible, at either end.

        The pipe stays open: a thread that it starts when a message first has to wait ends only when it
        closes.
        """
        pipe, child = self.remote_pipe(remote.echo_and_look)

        def one(number: int) -> None:
            child.send("echo")
            _echo(pipe, number)

        _repeat(one, 60, child, spans=3)

    def _come_and_go(self, rounds: int) -> None:
        listener = self.endpoint().listen()
        self.later(listener.close)

        def one(number: int) -> None:
            with self.scope():
                child = self.connecting(listener.contact, remote.echo)
                pipe = self.accept(listener)
                _echo(pipe, number)
                if number % 4 == 0:
                    child.kill()
                    raises(PeerGoneError, partial(pipe.recv_tensor, timeout=waits.patience_s))
                if number % 4 == 1:
                    child.kill()  # does not wait for its death to be detected
                if number % 2:
                    pipe.abort()
                else:
                    pipe.close()
                child.wait()

        _repeat(one, rounds, None)

    def _connect_again_and_again(self, rounds: int) -> None:
        contact, child = self.remote_listener(remote.accept_without_end)
        end = self.endpoint()

        def one(number: int) -> None:
            child.send("accept")
            pipe: Pipe = Call(partial(end.connect, contact)).result()
            _echo(pipe, number)
            if number % 3:
                pipe.close()
            else:
                pipe.abort()
            assert child.recv() == "ended"

        _repeat(one, rounds, child)

    def _meet_again_and_again(self, rounds: int) -> None:
        end = self.endpoint()
        listener = end.listen()
        self.later(listener.close)

        def one(number: int) -> None:
            with self.scope():
                here, there = self.join(end, listener)
                transfer = here.send_tensor(remote.content(number, NBYTES))
                assert not (wrong := remote.unlike(received(there), number, NBYTES)), wrong
                transfer.wait(waits.patience_s)
                for pipe in (here, there):
                    if number % 3:
                        pipe.close()
                    else:
                        pipe.abort()

        _repeat(one, rounds, None)


def _repeat(one: Callable[[int], None], rounds: int, child: peers.Peer | None, spans: int = 1) -> None:
    """Run the rounds, and check that nothing grows after the first few.

    Growth in one span of that many rounds is none yet: a module that is imported meanwhile, or a block that
    is taken once, is no leak. With several ``spans`` growth is allowed in fewer than half of them: memory
    that was freed earlier can hide a leak for a while.
    """
    for number in range(WARM_UP):
        one(number)
    steady, grown = 0, []
    while 2 * steady < spans:
        before, theirs = Footprint.taken(), None if child is None else _of(child)
        for number in range(rounds):
            one(number)
        held = _held(partial(_growth_here, before, rounds), "this process")
        if not held and child is not None and theirs is not None:
            held = _held(partial(_growth_of, child, theirs, rounds), "the other process, which lives on,")
        if held:
            grown.append(held)
        else:
            steady += 1
        assert len(grown) < 2 or 2 * len(grown) < spans, "; and then ".join(grown)


def _held(growth: Callable[[], str], who: str) -> str:
    """A description of what has grown; empty if nothing has. Resources get some time to be released."""
    limit = time.monotonic() + waits.patience_s / 4
    while more := growth():
        if time.monotonic() > limit:
            return f"{who} holds {more}"
        time.sleep(0.05)
    return ""


def _growth_here(before: Footprint, rounds: int) -> str:
    return Footprint.taken().growth(before, rounds, NBYTES)


def _of(child: peers.Peer) -> Footprint:
    child.send("look")
    return Footprint.from_plain(child.recv())


def _growth_of(child: peers.Peer, before: Footprint, rounds: int) -> str:
    return _of(child).growth(before, rounds, NBYTES)


def _echo(pipe: Pipe, number: int) -> None:
    transfer = pipe.send_tensor(remote.content(number, NBYTES))
    assert not (wrong := remote.unlike(received(pipe), number, NBYTES)), wrong
    transfer.wait(waits.patience_s)
