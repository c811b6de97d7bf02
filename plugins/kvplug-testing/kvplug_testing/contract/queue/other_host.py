"""The writer and a reader are on two hosts, which share no memory (capability ``cross_host``).

See :mod:`kvplug_testing.hosts`. All ends are in other processes.
"""

from __future__ import annotations

from typing import Any

from kvplug.transport import MessageQueue
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.messages import check_layers, layers
from kvplug_testing.contract.queue.processes import dequeue, enqueue
from kvplug_testing.contract.queue.suite import MIB, QueueSuite, RemoteEnd
from kvplug_testing.peers import Parent
from kvplug_testing.waits import until


class OtherHost(QueueSuite):
    """The writer and the reader of rank 0 are on host 0, the reader of rank 1 is on host 1."""

    @law("QUEUE-1", needs="another_host")
    def test_readers_on_both_hosts_get_each_message_once_and_in_order(self) -> None:
        writer, readers = self._queue()
        for number in range(50):
            writer.run(enqueue, number)
            assert [reader.run(dequeue) for reader in readers] == [number, number]
        nbytes = min(4 * MIB, self.most_bytes) - 4096  # leaves room for headers
        for reader in readers:
            reader.begin(check_layers, nbytes)
        for step in range(3):
            writer.run(enqueue_layers, nbytes, step)
        assert [reader.result() for reader in readers] == ["", ""]

    @law("QUEUE-2", "ALL-2", needs="another_host")
    def test_a_reader_that_is_killed_on_another_host_is_evicted_and_the_others_go_on(self) -> None:
        writer, (near, far) = self._queue()
        far.child.kill()
        until(lambda: writer.run(gone) == [1], what="that the killed reader is evicted")
        for number in range(20):
            writer.run(enqueue, number)
            assert near.run(dequeue) == number

    def _queue(self) -> tuple[RemoteEnd, list[RemoteEnd]]:
        context: dict[str, Any] = {"local_reader_ranks": [] if self.over_network else [0]}
        handle, writer = self.remote_writer(2, at_host=0, **context)
        return writer, [
            self.remote_reader(handle, host, at_host=host, n_reader=2, **context) for host in (0, 1)
        ]


def enqueue_layers(parent: Parent, writer: MessageQueue, nbytes: int, step: int) -> None:
    enqueue(parent, writer, layers(nbytes, step))


def gone(parent: Parent, writer: MessageQueue) -> list[int]:
    return [reader.rank for reader in writer.readers if reader.gone]
