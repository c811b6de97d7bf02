"""The process at the other end dies or forks in the middle of messages, and what comes of them (laws ALL-2,
ALL-5 and ALL-6).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from functools import partial

import pytest

from kvplug import PeerGoneError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received
from kvplug_testing.waits import Call

_KILLS = 12


class OtherProcess(PipeSuite):
    """Deaths and forks. The general laws judge what calls raise; this, what comes of messages."""

    @law("ALL-2", needs="other_processes", level="long", timeout_s=120)
    @pytest.mark.parametrize("nbytes", [0, 100, 70_000, 3 * MIB])
    def test_of_a_message_in_which_the_peer_is_killed_nothing_is_received(self, nbytes: int) -> None:
        """Kills at many positions in the message, with memory of the caller and without."""
        import torch

        chance = random.Random(nbytes)
        for round_ in range(_KILLS):
            pipe, child = self.remote_pipe(remote.send_without_end, nbytes)
            kill = threading.Timer(chance.uniform(0, 0.03), os.kill, (child.pid, signal.SIGKILL))
            number = 0
            while True:
                if number == 1:
                    kill.start()
                out = torch.zeros(nbytes, dtype=torch.uint8) if round_ % 2 else None
                receiving = Call(partial(pipe.recv_tensor, out, timeout=waits.patience_s))
                if isinstance(receiving.end(waits.patience_s + 1).error, PeerGoneError):
                    break
                wrong = remote.unlike(receiving.result(), number, nbytes)
                assert not wrong, f"the peer was killed, and then {wrong}"
                number += 1

    @law("ALL-6", "ALL-5", needs="other_and_forked_processes")
    def test_a_forked_child_connects_anew_and_the_pipe_it_inherited_stays_its_parents(self) -> None:
        one, other = self.pair()
        transfer = one.send_tensor(remote.content(1, 40 * MIB))
        called: list[int] = []
        transfer.add_done_callback(lambda _: called.append(os.getpid()))
        listener = self.endpoint().listen()
        self.later(listener.close)

        def connect() -> str:
            if not transfer.done() or os.getpid() in called:
                return f"the parent's {transfer} is under way, or a callback of the parent's was called"
            with self.endpoint().connect(listener.contact, timeout=waits.patience_s) as pipe:
                pipe.send_tensor(remote.content(3, 1000))
                return remote.unlike(pipe.recv_tensor(timeout=waits.patience_s), 4, 1000)

        child = Call(lambda: in_forked_child(connect))
        pipe = self.accept(listener)
        assert not (wrong := remote.unlike(received(pipe), 3, 1000)), wrong
        pipe.send_tensor(remote.content(4, 1000))
        assert not (wrong := child.result(2 * waits.patience_s)), wrong
        assert not (wrong := remote.unlike(received(other), 1, 40 * MIB)), wrong
        transfer.wait(waits.patience_s)
        other.send_tensor(remote.content(5, 50_000))
        assert not (wrong := remote.unlike(received(one), 5, 50_000)), wrong
