"""Ends are killed or stopped at many moments while messages are in flight (ALL-2, ALL-3, QUEUE-2)."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvplug import PeerGoneError, TimeoutError
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import CHUNK, QueueSuite
from kvplug_testing.peers import Parent, Peer
from kvplug_testing.waits import Call, until

SIZES = (10, CHUNK // 2, 3000, 3 * CHUNK, 100)
"""Sizes of the messages in bytes, used in turn."""
MOMENTS = 24
MORE = 50
"""Messages after the kill or stop: more than there are chunks."""
LAST = "the last"
_NUMBER = 8


def message(number: int) -> tuple[int, bytes]:
    return number, bytes([number % 251]) * SIZES[number % len(SIZES)]


def fault_of(got: Any, number: int) -> str:
    """A description of how a message differs from ``message(number)``; empty if it is equal."""
    if got == message(number):
        return ""
    if not (type(got) is tuple and len(got) == 2 and type(got[1]) is bytes):
        return f"{got!r} came where message {number:,} was due"
    return f"message {got[0]!r} of {len(got[1]):,} bytes came where {number:,} was due, or other bytes of it"


def delays() -> Iterator[float]:
    """Delays before a kill: short and longer ones."""
    rng = random.Random(5)
    for _ in range(MOMENTS):
        yield 0.0005 * 2 ** rng.uniform(0, 9)


def read_all(parent: Parent | None, reader: MessageQueue, timeout: float | None = None) -> list[Any]:
    """Read all messages. Returns their number and the first error.

    With a ``timeout``, it retries after each timeout.
    """
    if parent is not None:
        parent.send("attached")
    number = 0
    while True:
        try:
            got = reader.dequeue(timeout=waits.patience_s if timeout is None else timeout)
        except TimeoutError:
            if timeout is None:
                raise
            continue
        if got == LAST:
            return [number, ""]
        if fault := fault_of(got, number):
            return [number, fault]
        number += 1


def write_until(writer: MessageQueue, over: Callable[[], bool]) -> int:
    """Send messages until ``over()``, then some more and the last one. Returns their number."""
    number, more = 0, MORE
    while more:
        writer.enqueue(message(number), timeout=waits.patience_s)
        number += 1
        more -= over()
    writer.enqueue(LAST, timeout=waits.patience_s)
    return number


def write_until_told(parent: Parent, writer: MessageQueue) -> int:
    parent.recv(timeout=waits.patience_s)
    over = threading.Event()

    def listen() -> None:
        parent.recv(timeout=None)
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    return write_until(writer, over.is_set)


def write_and_note(parent: Parent, writer: MessageQueue, path: str) -> str:
    """Send messages until killed; a file holds the number of enqueued messages."""
    parent.recv(timeout=waits.patience_s)
    noted = os.open(path, os.O_WRONLY)
    number = 0
    while True:
        writer.enqueue(message(number), timeout=waits.patience_s)
        number += 1
        os.pwrite(noted, number.to_bytes(_NUMBER, "little"), 0)


def until_the_writer_is_gone(reader: MessageQueue) -> tuple[int, str]:
    """Read until the writer is gone. Returns the number of messages and the first error."""
    number = 0
    while True:
        try:
            got = reader.dequeue(timeout=waits.patience_s)
        except PeerGoneError:
            return number, ""
        if fault := fault_of(got, number):
            return number, fault
        number += 1


def _end(victim: Peer, delay_s: float) -> None:
    time.sleep(delay_s)
    victim.kill()


class CrashPoints(QueueSuite):
    """Kills and stops at many moments."""

    @law("ALL-2", "ALL-5", needs="other_processes", level="long", timeout_s=300)
    def test_whenever_the_writer_is_killed_readers_get_what_it_had_enqueued_and_nothing_else(self) -> None:
        for delay_s in delays():
            with self.scope(), tempfile.NamedTemporaryFile() as noted:
                handle, child = self.remote_writer(2, write_and_note, noted.name)
                readers = [self.attach(handle, rank) for rank in range(2)]
                calls = [Call(partial(until_the_writer_is_gone, reader)) for reader in readers]
                child.send("go")
                until(lambda file=noted: os.fstat(file.fileno()).st_size, what="the first message")  # type: ignore[misc]
                _end(child, delay_s)
                enqueued = int.from_bytes(os.pread(noted.fileno(), _NUMBER, 0), "little")
                for reader, call in zip(readers, calls, strict=True):
                    came, fault = call.result(waits.patience_s + 5)
                    assert not fault, f"killed after {delay_s:.4f} s: {fault}"
                    # One more may be enqueued by a call that has not returned yet.
                    assert enqueued <= came <= enqueued + 1, (
                        f"the writer had enqueued {enqueued:,} messages when it was killed, and reader rank"
                        f" {reader.rank} got {came:,}"
                    )
                    reader.close()

    @law("QUEUE-2", needs="other_processes", level="long", timeout_s=300)
    def test_whenever_a_reader_is_killed_the_others_get_everything(self) -> None:
        for delay_s in delays():
            with self.scope():
                writer = self.writer(3)
                local = self.reader(writer, 0)
                victim, remote = (self.remote_reader(writer, rank, read_all) for rank in (1, 2))
                victim.recv()
                remote.recv()
                call = Call(partial(read_all, None, local))
                killing = Call(partial(_end, victim, delay_s))
                over = partial(getattr, killing, "ended")
                count = Call(partial(write_until, writer, over)).result(60)
                killing.result()
                for got in (call.result(), remote.result()):
                    assert got == [count, ""], f"killed after {delay_s:.4f} s"
                writer.close()

    @law("ALL-3", "QUEUE-1", needs="other_processes", level="long", timeout_s=300)
    @pytest.mark.parametrize("who", ["reader", "writer"])
    def test_whenever_a_process_is_stopped_it_goes_on_where_it_was(self, who: str) -> None:
        over = threading.Event()
        if who == "writer":
            handle, child = self.remote_writer(1, write_until_told)
            reader = self.attach(handle)
            self.later(reader.abort)
            child.send("go")
            call = Call(partial(read_all, None, reader, 0.05))
        else:
            writer = self.writer(1)
            child = self.remote_reader(writer, 0, read_all)
            child.recv()
            call = Call(partial(write_until, writer, over.is_set))
        for delay_s in delays():
            time.sleep(delay_s)
            child.stop()
            time.sleep(0.1)
            child.cont()
        over.set()
        if who == "writer":
            child.send("enough")
            assert call.result(60) == [child.result(60), ""]
        else:
            assert child.result(60) == [call.result(60), ""]
