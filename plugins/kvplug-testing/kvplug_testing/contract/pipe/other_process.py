"""Ends in other processes, which die, stop or fork (laws END-2, ALL-2, ALL-3 and ALL-6), and on other hosts.

The general laws judge what calls raise then; this, what comes of messages, of listeners and of ``connect``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from functools import partial
from typing import Any, Final

import pytest

from kvplug import KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import Pipe, PipeListener
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import at_host, law
from kvplug_testing.contract.ends import CHILD_S, RUN_END, fields_of
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.contract.pipe.content import numbered
from kvplug_testing.contract.pipe.ends import PipeGeneral
from kvplug_testing.contract.pipe.suite import MIB, received, sent
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call

_KILLS: Final = 6
"""Each with memory of the caller and without."""
_MOMENTS_S: Final = (0.0, 0.004, 0.008, 0.012, None)
"""When a peer is killed or stopped: seconds after it begins to connect; ``None``: once it has connected."""


class OtherProcess(PipeGeneral):
    """One end is in another process."""

    @law("ALL-2", needs="other_processes", level="long", timeout_s=120)
    @pytest.mark.parametrize("nbytes", [0, 100, 70_000, 3 * MIB])
    def test_of_a_message_in_which_the_peer_is_killed_nothing_is_received(self, nbytes: int) -> None:
        """Kills at many positions in the message, with memory of the caller and without."""
        import torch

        chance = random.Random(nbytes)
        for out in [None, torch.empty(nbytes, dtype=torch.uint8)] * _KILLS:
            with self.scope():
                listener = self.listen()
                arguments = self.suite_ref(), listener.contact, nbytes
                child = self.start_forked(f"{__name__}:send_numbered", *arguments, timeout_s=CHILD_S)
                pipe = self.accept(listener)
                assert_same(numbered(0, nbytes), received(pipe))
                threading.Timer(chance.uniform(0, 0.03), os.kill, (child.pid, signal.SIGKILL)).start()
                for number in itertools.count(1):
                    receiving = Call(partial(pipe.recv_tensor, out, timeout=waits.patience_s))
                    if isinstance(receiving.end(waits.patience_s + 1).error, PeerGoneError):
                        break
                    assert_same(numbered(number, nbytes), receiving.result(), "of a peer that is killed")

    @law("ALL-6", "ALL-5", needs="other_and_forked_processes")
    def test_a_forked_child_connects_anew_and_the_pipe_it_inherited_stays_its_parents(self) -> None:
        one, other = self.pair()
        transfer = one.send_tensor(numbered(1, 40 * MIB))
        called: list[int] = []
        transfer.add_done_callback(lambda _: called.append(os.getpid()))
        listener = self.listen()

        def connect() -> str:
            if not transfer.done() or os.getpid() in called:
                return f"the parent's {transfer} is under way, or a callback of the parent's was called"
            with self.endpoint().connect(listener.contact, timeout=waits.patience_s) as pipe:
                _echoes(pipe, 3)
            return ""

        child = Call(lambda: in_forked_child(connect))
        pipe = self.accept(listener)
        sent(pipe, received(pipe))
        assert not (wrong := child.result(2 * waits.patience_s)), wrong
        assert_same(numbered(1, 40 * MIB), received(other))
        transfer.wait(waits.patience_s)
        sent(other, numbered(5, 50_000))
        assert_same(numbered(5, 50_000), received(one))

    @law("END-2", "ALL-2", needs="other_processes")
    @pytest.mark.parametrize("how", ["is killed", "is stopped"])
    def test_a_peer_that_is_killed_or_stopped_holds_up_nobody(self, how: str) -> None:
        listener = self.listen()
        Call(lambda: echo_to_all(listener))
        working = self._connected(listener.contact)
        for number, moment_s in enumerate(_MOMENTS_S):
            child = self.start_forked(RUN_END, self.suite_ref(), 1, {}, timeout_s=CHILD_S)
            child.send(listener.contact)
            if moment_s is None:
                child.recv()
            else:
                time.sleep(moment_s)
            child.kill() if how == "is killed" else child.stop()
            _echoes(self._connected(listener.contact), number)
            _echoes(working, number)

    def _connected(self, contact: str) -> Pipe:
        connect = partial(self.endpoint().connect, contact, timeout=waits.patience_s)
        pipe: Pipe = Call(connect).result(waits.patience_s + 1)
        self.later(pipe.abort)
        return pipe

    @law("ALL-3", "ALL-4", needs="other_processes")
    def test_connecting_to_a_stopped_listener_ends_in_time_and_succeeds_when_it_goes_on(self) -> None:
        child = self.start_forked(f"{__name__}:listen", self.suite_ref(), {}, timeout_s=CHILD_S)
        contact = child.recv()
        child.stop()
        for timeout in (0, 0.5):
            connecting = Call(partial(self.endpoint().connect, contact, timeout=timeout)).end()
            if connecting.error is None:  # the kernel completed the connection
                connecting.value.abort()
            else:
                assert connecting.took_s > timeout - 0.05, f"connect gave up after {connecting.took_s:.3f} s"
                assert len(str(connecting.raised(TimeoutError))) > 10, "it does not say what it waited for"
        child.cont()
        _echoes(self._connected(contact), 1)

    # -- on two hosts, which share no memory, socket names or processes (capability ``cross_host``) --------

    @law("PIPE-1", "END-1", needs="another_host")
    @pytest.mark.parametrize("listening", [0, 1])
    def test_messages_arrive_whole_and_in_order_from_another_host(self, listening: int) -> None:
        ends = self.between_hosts((listening, 1 - listening))
        for number in range(10):
            self.exchange(ends, number)

    @law("ALL-4", "END-2", needs="another_host")
    def test_connecting_to_a_host_that_does_not_answer_ends_in_time_and_succeeds_when_it_does(self) -> None:
        listen = f"{__name__}:listen"
        contact = self.start_at(0, listen, self.suite_ref(), {"at_host": 0}, timeout_s=CHILD_S).recv()
        with self.hosts().apart():
            error = self._dial(contact, 1.0)
            assert error.startswith(("TimeoutError", "PeerGoneError")), f"no host answered: {error!r}"
        error = self._dial(contact, waits.patience_s)
        assert not error, f"the host answers again; connect gave {error!r}"

    def _dial(self, contact: str, timeout: float) -> str:
        """Connect on host 1; returns the error. It must end in time."""
        child = self.start_at(1, f"{__name__}:dial", self.suite_ref(), contact, timeout, timeout_s=CHILD_S)
        return str(child.result(timeout + 5.0))


def _echoes(pipe: Pipe, number: int) -> None:
    """Check that the other end sends a message back."""
    sent(pipe, numbered(number, 1000))
    assert_same(numbered(number, 1000), received(pipe))


def echo_to_all(listener: PipeListener) -> None:
    """Accept peers until the listener is closed, and send back what each of them sends until it is gone."""

    def echo(pipe: Pipe) -> None:
        with contextlib.closing(pipe):
            while True:
                pipe.send_tensor(pipe.recv_tensor(timeout=None))

    while True:
        Call(partial(echo, listener.accept(timeout=None)))


# -- in other processes ------------------------------------------------------------------------------


def send_numbered(parent: Parent, suite_ref: dict[str, Any], contact: str, nbytes: int) -> None:
    """Connect, and send numbered messages until it is killed."""
    pipe = suite_from_ref(suite_ref).endpoint().connect(contact)
    for number in itertools.count():
        pipe.send_tensor(numbered(number, nbytes), timeout=None)


def listen(parent: Parent, suite_ref: dict[str, Any], context: dict[str, Any]) -> None:
    """Listen, report the contact, and echo until it is killed."""
    listener = suite_from_ref(suite_ref).endpoint(**fields_of(context)).listen()
    parent.send(listener.contact)
    echo_to_all(listener)


def dial(parent: Parent, suite_ref: dict[str, Any], contact: str, timeout: float) -> str:
    """On host 1: connect; returns the error."""
    try:
        suite_from_ref(suite_ref).endpoint(**at_host(1)).connect(contact, timeout=timeout).close()
    except KvplugError as e:
        return f"{type(e).__name__}: {e}"
    return ""
