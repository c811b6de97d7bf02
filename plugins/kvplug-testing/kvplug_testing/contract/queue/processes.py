"""Ends in several processes that are killed or stopped, also on another host."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvplug import PeerGoneError, TimeoutError
from kvplug.transport import MessageQueue, QueueHandle
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import CHILD_S, RUN_END, RemoteHandle
from kvplug_testing.contract.queue.ends import QueueGeneral
from kvplug_testing.contract.queue.readers import check_named
from kvplug_testing.contract.queue.suite import (
    CHUNKS,
    all_received,
    fill,
    in_time,
    passes,
    read,
    received,
    sent,
    write,
)
from kvplug_testing.waits import Call, raises

_VALUES = 60


class Processes(QueueGeneral):
    """One queue with ends in several processes."""

    def _writer_elsewhere(self, start: Callable[..., Any], **context: Any) -> tuple[Any, RemoteHandle]:
        """The plain handle of a queue whose writer is in another process, and that end."""
        child = start(RUN_END, self.suite_ref(), 0, context, timeout_s=CHILD_S)
        return child.recv(), RemoteHandle(child, child.recv()[1])

    def _reader_elsewhere(self, start: Callable[..., Any], plain: Any, **context: Any) -> RemoteHandle:
        """A reader in another process, which has attached."""
        child = start(RUN_END, self.suite_ref(), 1, context, timeout_s=CHILD_S)
        child.send(plain)
        return RemoteHandle(child, child.recv()[1])

    def _with_one_elsewhere(self, n_reader: int) -> tuple[MessageQueue, list[MessageQueue], RemoteHandle]:
        """A writer, all readers but that of rank 1, and the reader of rank 1 in another process."""
        writer = self.writer(n_reader)
        plain = writer.export_handle().as_plain()
        there = self._reader_elsewhere(self.start_forked, plain, rank=1)
        return writer, [self.reader(writer, rank) for rank in range(n_reader) if rank != 1], there

    @law("QUEUE-2", "ALL-2", needs="other_processes")
    def test_a_reader_that_is_killed_with_a_chunk_in_use_is_evicted_and_the_others_go_on(self) -> None:
        writer, others, victim = self._with_one_elsewhere(3)
        in_time(write, writer, b"in place")
        victim.run("hold")
        assert [in_time(read, reader) for reader in others] == [b"in place"] * 2
        sent(writer, *range(CHUNKS - 1))
        waiting = Call(lambda: writer.enqueue(CHUNKS - 1, timeout=waits.patience_s))
        assert waiting.is_blocked()
        victim.child.kill()
        waiting.result(waits.patience_s + 1)
        for reader in others:
            assert_same([*range(CHUNKS)], all_received(reader, CHUNKS).result())
        passes(writer, others, *range(3 * CHUNKS))
        dead = writer.readers[1]
        assert dead.gone and dead.died, f"reader rank 1 was killed, and this is known of it: {dead}"
        assert f"pid {victim.child.pid}" in str(dead), f"the dead reader's process is not named: {dead}"

    @law("ALL-2", "ALL-5", "QUEUE-1", needs="other_processes")
    def test_of_a_writer_that_is_killed_all_it_had_sent_is_received_and_half_a_chunk_never_is(self) -> None:
        plain, writer = self._writer_elsewhere(self.start_forked, n_reader=2)
        handle = QueueHandle.from_plain(plain)
        readers = [self.attach(handle, rank) for rank in range(2)]
        writer.run("write_half")
        with readers[0].acquire_read(timeout=waits.patience_s) as view:
            writer.child.kill()
            assert bytes(view) == bytes(1000), "what is being read went away with its writer"
        assert in_time(read, readers[1]) == bytes(1000)
        for reader in readers:
            assert [received(reader) for _ in range(CHUNKS - 2)] == [*range(1, CHUNKS - 1)]
            for call in (partial(in_time, read), received, partial(in_time, read)):
                raises(PeerGoneError, partial(call, reader))
        raises(PeerGoneError, lambda: self.attach(handle))

    @law("ALL-3", "QUEUE-3", needs="other_processes")
    def test_a_reader_that_is_stopped_is_named_with_its_process_and_not_evicted(self) -> None:
        writer, (local,), stops = self._with_one_elsewhere(2)
        stops.child.stop()
        held = fill(writer)
        assert [received(local) for _ in range(held)] == [*range(held)]
        error = raises(TimeoutError, lambda: writer.enqueue("x", timeout=0.5))
        check_named(str(error), 1, f"pid {stops.child.pid}", held)
        assert not writer.readers[1].gone, "a reader that is only stopped was evicted"
        stops.child.cont()
        stops.run("drain", held)

    @law("QUEUE-2", needs="other_processes", level="long", timeout_s=300)
    def test_whenever_a_reader_is_killed_the_others_get_everything(self) -> None:
        rng = random.Random(5)
        for _ in range(24):
            with self.scope():
                writer, (one, other), victim = self._with_one_elsewhere(3)
                victim.begin("drain", _VALUES)
                threading.Timer(0.0005 * 2 ** rng.uniform(0, 6), victim.child.kill).start()
                passes(writer, [one, other], *([at, bytes(at * 2000)] for at in range(_VALUES)))

    # -- on two hosts, which share no memory (capability ``cross_host``) -----------------------------------

    @law("QUEUE-1", "QUEUE-2", "ALL-2", needs="another_host")
    def test_readers_on_both_hosts_get_each_message_once_and_in_order_also_when_one_is_killed(self) -> None:
        """The writer and the reader of rank 0 are on host 0, the reader of rank 1 is on host 1."""
        context = {"n_reader": 2, "local_reader_ranks": [] if self.over_network else [0]}
        plain, writer = self._writer_elsewhere(partial(self.start_at, 0), at_host=0, **context)
        near, far = (
            self._reader_elsewhere(partial(self.start_at, host), plain, rank=host, at_host=host, **context)
            for host in (0, 1)
        )
        for number in range(50):
            _exchange((writer, near, far), number)
        far.child.kill()
        for number in range(20):
            _exchange((writer, near), number)


def _exchange(ends: Sequence[RemoteHandle], number: int) -> None:
    """Every end takes part in exchange ``number``."""
    parts = [end.begin("part", number, waits.patience_s) for end in ends]
    for part in parts:
        part.result()
