"""The process at the other end dies before, during and after a message that it sends (laws ALL-2, ALL-5)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvplug import PeerGoneError
from kvplug.transport import Pipe, Transfer
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite
from kvplug_testing.waits import Call, raises, until

SIZES = (0, 1, 100, 5_000, 70_000, MIB, 3 * MIB, 24 * MIB)
"""Sizes of messages during which a peer is killed: from less than one read to far more than any buffer."""
CUT_BYTES = 3 * MIB
"""A message size so large that some of many kills interrupt a message."""


def assert_gone(pipe: Pipe) -> None:
    """Every call raises, also repeatedly. Before the death is detected, sends may succeed."""
    for _ in range(2):
        raises(PeerGoneError, partial(pipe.recv_tensor, timeout=waits.patience_s))
    raises(PeerGoneError, lambda: _send_until_told(pipe))
    for _ in range(2):
        raises(PeerGoneError, partial(pipe.send_tensor, None, timeout=waits.patience_s))


def _send_until_told(pipe: Pipe) -> None:
    limit = time.monotonic() + waits.patience_s
    while time.monotonic() < limit:
        pipe.send_tensor(None, timeout=waits.patience_s)
        time.sleep(0.001)


def receive_until_gone(pipe: Pipe, size_of: Callable[[int], int], with_out: bool = False) -> int:
    """The number of messages received before the peer is gone; each must be complete."""
    import torch

    number = 0
    while True:
        nbytes = size_of(number)
        out = torch.zeros(nbytes, dtype=torch.uint8) if with_out else None
        receiving = Call(partial(pipe.recv_tensor, out, timeout=waits.patience_s))
        if isinstance(receiving.end(waits.patience_s + 1).error, PeerGoneError):
            return number
        message = receiving.result()
        assert not (wrong := remote.unlike(message, number, nbytes)), f"the peer was killed, and then {wrong}"
        number += 1


def assert_ended(transfers: list[Transfer]) -> None:
    """Each transfer ends in success or with PeerGoneError."""
    for number, transfer in enumerate(transfers):
        until(transfer.done, what=f"the end of transfer {number} of {len(transfers)}")
        assert transfer.error() is None or isinstance(transfer.error(), PeerGoneError), transfer


class PeerDeath(PipeSuite):
    """The process at the other end dies."""

    @law("ALL-5", needs="other_processes")
    @pytest.mark.parametrize("nbytes", [100, MIB, 24 * MIB])
    def test_every_transfer_ends_when_the_peer_is_killed_and_whoever_waits_is_told(self, nbytes: int) -> None:
        pipe, child = self.remote_pipe(remote.wait)
        child.recv()
        transfers = [pipe.send_tensor(remote.content(n, nbytes)) for n in range(2)]
        called: list[Transfer] = []
        for transfer in transfers:
            transfer.add_done_callback(called.append)
        waiting = [Call(transfer.wait) for transfer in transfers]
        child.kill()
        assert_ended(transfers)
        for call, transfer in zip(waiting, transfers, strict=True):
            call.end()
            assert call.error is transfer.error(), (
                f"{transfer} ended, and the waiting call got {call.error!r}"
            )
        until(lambda: len(called) == len(transfers), what="the callback of each transfer")

    @law("ALL-2", "ALL-5", needs="other_processes")
    def test_a_close_that_is_still_sending_ends_when_the_peer_is_killed(self) -> None:
        pipe, child = self.remote_pipe(remote.wait)
        child.recv()
        transfer = pipe.send_tensor(remote.content(1, 40 * MIB))
        closing = Call(partial(pipe.close, timeout=10 * waits.patience_s))
        time.sleep(0.05)
        child.kill()
        closing.result()
        assert transfer.done(), "the pipe is closed, and a transfer is still under way"

    @law("ALL-2", needs="other_processes", level="long")
    @pytest.mark.parametrize("nbytes", SIZES)
    def test_of_a_message_in_which_the_peer_is_killed_nothing_is_received(
        self, nbytes: int, tmp_path: Path
    ) -> None:
        """Kills at many positions in the message, with a receiver that is reading it and without one."""
        self._kill_at_many_places(nbytes, 4, tmp_path / "begun")

    @law("ALL-2", level="long", needs="other_processes", timeout_s=600)
    @pytest.mark.parametrize("nbytes", SIZES)
    def test_of_a_message_in_which_the_peer_is_killed_nothing_is_received_at_any_place(
        self, nbytes: int, tmp_path: Path
    ) -> None:
        cut = self._kill_at_many_places(nbytes, 50, tmp_path / "begun")
        assert cut or nbytes < CUT_BYTES, f"of 50 kills none has cut a message of {nbytes:,} bytes"

    def _kill_at_many_places(self, nbytes: int, rounds: int, count: Path) -> int:
        """The number of rounds in which the kill interrupted a message that the peer had begun.

        Only rounds that send one message at a time count: in the others a message may still be queued.
        """
        chance = random.Random(nbytes)
        cut = 0
        for round_ in range(rounds):
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
            came = receive_until_gone(pipe, lambda _: nbytes, with_out=round_ % 4 >= 2)
            child.wait()
            begun = _number_in(count)
            assert came <= begun, f"{came} messages came of a peer that had begun {begun}"
            cut += singly and came < begun
            assert_gone(pipe)
            pipe.abort()
            child.close()
        return cut

    @law("ALL-2", needs="other_processes")
    @pytest.mark.parametrize("count", [1, 20])
    def test_whole_messages_of_a_peer_that_was_killed_come_first_or_not_at_all(self, count: int) -> None:
        sizes = [1000 + n for n in range(count)]
        pipe, child = self.remote_pipe(remote.send, sizes)
        assert [child.recv(), child.recv()] == ["queued", "sent"]
        child.kill()
        came = receive_until_gone(pipe, lambda number: sizes[min(number, count - 1)])
        assert came <= count
        assert_gone(pipe)


def _number_in(count: Path) -> int:
    return int.from_bytes(count.read_bytes(), "little")
