"""The writer and a reader are on two hosts, which share no memory (capability ``cross_host``).

See :mod:`kvplug_testing.hosts`. Both ends are in other processes, which carry out the test's commands.
"""

from __future__ import annotations

from typing import Any

from kvplug import KvplugError
from kvplug.transport import MessageQueue, QueueHandle
from kvplug_testing import waits
from kvplug_testing.contract.base import at_host, law
from kvplug_testing.contract.queue.large import digest, layers
from kvplug_testing.contract.queue.suite import LIFE_S, MIB, QueueSuite, wrong
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent, Peer
from kvplug_testing.waits import until

_RANKS = {"near": 0, "far": 1}


class OtherHost(QueueSuite):
    """The writer and the reader "near" are on host 0, the reader "far" is on host 1."""

    @law("QUEUE-1", needs="another_host")
    def test_readers_on_both_hosts_get_each_message_once_and_in_order(self) -> None:
        writer, readers = self._queue()
        for number in range(50):
            _do(writer, "enqueue", number)
            if number % 2:
                for rank, reader in readers.items():
                    got = [_do(reader, "dequeue") for _ in range(2)]
                    assert not (fault := wrong(got, [number - 1, number])), f"at the reader {rank}, {fault}"

    @law("QUEUE-1", needs="another_host")
    def test_large_values_reach_readers_on_both_hosts(self) -> None:
        writer, readers = self._queue()
        nbytes = min(4 * MIB, self.most_bytes) - 4096  # leaves room for headers
        nbytes -= nbytes % 4096
        for step in range(3):
            writer.send(["enqueue layers", nbytes, step])
            for rank, reader in readers.items():
                fault = wrong([_do(reader, "dequeue a digest")], [digest(layers(nbytes, step))])
                assert not fault, f"at the reader {rank}, {fault}"
            _done(writer)

    @law("QUEUE-2", "ALL-2", needs="another_host")
    def test_a_reader_that_is_killed_on_another_host_is_evicted_and_the_others_go_on(self) -> None:
        writer, readers = self._queue()
        readers["far"].kill()
        until(lambda: _do(writer, "gone") == [_RANKS["far"]], what="that the killed reader is evicted")
        for number in range(20):
            _do(writer, "enqueue", number)
            got = _do(readers["near"], "dequeue")
            assert got == number, f"with a dead reader on another host {got!r} came for {number}"

    def _queue(self, **context: Any) -> tuple[Peer, dict[str, Peer]]:
        """The processes of the writer and of both readers."""
        context["n_reader"] = len(_RANKS)
        context["local_reader_ranks"] = [] if self.over_network else [_RANKS["near"]]
        writer = self._start_at(0, context, {}, 0)
        handle = writer.recv()
        readers = {
            name: self._start_at(rank, context, handle, rank)  # the ranks are the numbers of the hosts
            for name, rank in _RANKS.items()
        }
        for reader in readers.values():
            assert reader.recv(2 * waits.patience_s) == "attached"
        return writer, readers

    def _start_at(self, host: int, *args: Any) -> Peer:
        return self.start_at(host, f"{__name__}:run_end", self.suite_ref(), host, *args, timeout_s=LIFE_S)


def _do(end: Peer, *command: Any) -> Any:
    """Let an end carry out a command, which must succeed in time."""
    end.send([*command])
    return _done(end)


def _done(end: Peer) -> Any:
    error, value = end.recv(waits.patience_s + 5)
    assert not error, f"{end!r}: {error}: {value}"
    return value


# -- on a host -------------------------------------------------------------------------------------


def run_end(
    parent: Parent,
    suite_ref: dict[str, Any],
    host: int,
    context: dict[str, Any],
    handle: dict[str, Any],
    rank: int,
) -> None:
    """An end, the writer's if there is no handle: carries out commands, and reports each error or value."""
    endpoint = suite_from_ref(suite_ref).endpoint(**at_host(host), **context)
    if handle:
        queue = endpoint.create_from_handle(QueueHandle.from_plain(handle), rank, timeout=waits.patience_s)
        parent.send("attached")
    else:
        queue = endpoint.create()
        parent.send(queue.export_handle().as_plain())
    with queue:
        while True:
            verb, *args = parent.recv(None)
            try:
                parent.send(["", _carry_out(queue, verb, args)])
            except KvplugError as e:
                parent.send([type(e).__name__, str(e)])


def _carry_out(queue: MessageQueue, verb: str, args: list[Any]) -> Any:
    match verb:
        case "enqueue":
            return queue.enqueue(args[0], timeout=waits.patience_s)
        case "enqueue layers":
            return queue.enqueue(layers(*args), timeout=waits.patience_s)
        case "dequeue":
            return queue.dequeue(timeout=waits.patience_s)
        case "dequeue a digest":
            return digest(queue.dequeue(timeout=waits.patience_s))
    return [reader.rank for reader in queue.readers if reader.gone]
