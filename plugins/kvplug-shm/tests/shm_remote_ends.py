"""A ring without shared memory, so that the network half of a queue can be tested by itself."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvplug import KvplugError
from kvplug.transport import Credentials, Deadline, QueueContext, Secret, Wait
from kvplug_shm.options import ShmQueueOptions
from kvplug_shm.queue.network import QueueMessage, Source
from kvplug_shm.queue.remote import attach, serve
from kvplug_shm.queue.remote_writer import RemoteWriter

PATIENCE_S = 30.0


def context(*, secret: str = "", host: str = "127.0.0.1", heartbeat_timeout_s: float = 10.0) -> QueueContext:
    return QueueContext(
        options=ShmQueueOptions(),
        credentials=Credentials(Secret(secret) if secret else None),
        host=host,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )


class ListFeed:
    """A :class:`~kvplug_shm.queue.network.Feed` over a list."""

    def __init__(self, reader_ranks: Sequence[int], places: int = 4) -> None:
        self.reader_ranks = tuple(reader_ranks)
        self.places = places
        self.messages: list[QueueMessage] = []
        self.read = dict.fromkeys(self.reader_ranks, 0)
        self.came: dict[int, str] = {}
        self.gone: dict[int, tuple[str, bool]] = {}
        self.waiting: set[int] = set()
        self.writer_waits = False
        self.moved = threading.Condition()

    def admit(self, rank: int, process: str) -> str:
        if rank in self.came:
            return f"reader rank {rank} has attached already"
        self.came[rank] = process
        return ""

    def published(self) -> int:
        return len(self.messages)

    def message(self, number: int) -> QueueMessage:
        return self.messages[number]

    def release(self, rank: int, count: int) -> None:
        with self.moved:
            assert self.read[rank] < count <= len(self.messages)
            self.read[rank] = count
            self.moved.notify_all()

    def ready(self, rank: int) -> None:
        self.waiting.add(rank)

    def all_ready(self) -> bool:
        return self.writer_waits and not set(self.reader_ranks) - self.waiting - set(self.gone)

    def evict(self, rank: int, why: str, *, died: bool) -> None:
        with self.moved:
            self.gone.setdefault(rank, (why, died))
            self.moved.notify_all()

    def lag(self) -> int:
        return len(self.messages) - min(
            (count for rank, count in self.read.items() if rank not in self.gone), default=len(self.messages)
        )

    def until(self, there: Callable[[], object]) -> None:
        """``there()``, in time; looked at whenever something moves, and now and then."""
        deadline = Deadline.after(PATIENCE_S)
        with self.moved:
            while not there():
                assert not deadline.expired, f"it did not come to it: {self.read} {self.came} {self.gone}"
                self.moved.wait(0.05)


class Writing:
    """A network half and its feed."""

    def __init__(self, context: QueueContext, reader_ranks: Sequence[int] = (0,), places: int = 4) -> None:
        self.feed = ListFeed(reader_ranks, places)
        network = serve(context, self.feed)
        assert isinstance(network, RemoteWriter)
        self.network = network

    def send(
        self, body: bytes, head: bytes = b"", *, raw: bool = False, timeout_s: float = PATIENCE_S
    ) -> None:
        self.feed.until(lambda: self.feed.lag() < self.feed.places)
        self.feed.messages.append(QueueMessage(raw, head, memoryview(body)))
        self.network.changed(Deadline.after(timeout_s))

    def close(self) -> None:
        self.network.close(Deadline.after(PATIENCE_S))


def wait_for(what: str, seconds: float = PATIENCE_S) -> Wait:
    return Wait(what, lambda: "the writer", Deadline.after(seconds))


def joined(context: QueueContext, data: Mapping[str, Any], rank: int = 0) -> Source:
    return attach(context, data, rank, Deadline.after(PATIENCE_S))


def taken(source: Source, seconds: float = PATIENCE_S) -> tuple[bool, bytes, bytes]:
    """The next message, which is done with."""
    message = source.receive(wait_for("a message", seconds), lambda: None)
    found = message.raw, bytes(message.head), bytes(message.body)
    source.advance()
    return found


# -- in other processes ------------------------------------------------------------------------------


def remote_reader(parent: Any, data: dict[str, Any], count: int, heartbeat_timeout_s: float = 10.0) -> str:
    """Takes ``count`` messages that are their numbers. Returns what was wrong."""
    source = joined(context(heartbeat_timeout_s=heartbeat_timeout_s), data)
    parent.send("joined")
    for number in range(count):
        found = taken(source)
        if found[2] != b"%d" % number:
            return f"{found} came where {number} was expected"
    source.leave(died=False)
    return ""


def idle_reader(parent: Any, data: dict[str, Any], heartbeat_timeout_s: float = 10.0) -> list[str]:
    """Joins, reads nothing until it is told, then everything. Returns how each began, and what ended it."""
    source = joined(context(heartbeat_timeout_s=heartbeat_timeout_s), data)
    parent.send("joined")
    parent.recv(None)
    found = []
    try:
        while True:
            found.append(taken(source)[2][:9].decode())
    except KvplugError as e:
        return [*found, f"{type(e).__name__}: {e}"]


def remote_writer(parent: Any, count: int, heartbeat_timeout_s: float = 10.0) -> None:
    """Sends ``count`` numbers to one reader, says so, and stays."""
    writing = Writing(context(heartbeat_timeout_s=heartbeat_timeout_s), places=count + 1)
    parent.send(dict(writing.network.data))
    parent.recv(None)
    for number in range(count):
        writing.send(b"%d" % number)
    parent.send("sent")
    parent.recv(None)


def without_descriptors(parent: Any) -> str:
    """Makes ends until there are no descriptors left. Returns what that was told as."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    made = []
    try:
        while True:
            made.append(Writing(context()))
            made.append(joined(context(), made[-1].network.data))  # type: ignore[union-attr]
    except KvplugError as e:
        return f"{type(e).__name__}: {e}"


def forking_reader(parent: Any, data: dict[str, Any]) -> None:
    """Joins, forks, and ends its connection, while the forked child lives on."""
    source = joined(context(), data)
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    parent.send(pid)
    source.leave(died=True)
    parent.recv(None)


FEW_DESCRIPTORS = 256
"""The limit of a writer that has 4 readers: strangers have at most 64 places."""


def writer_with_few_descriptors(parent: Any) -> None:
    """Sends a message to its readers when it is told to go. Answers everything with how many it has."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    writing = Writing(context(), range(4), places=8)
    parent.send(dict(writing.network.data))
    while (said := parent.recv(None)) is not None:
        if said == "go":
            writing.send(b"still there")
        parent.send(len(os.listdir("/proc/self/fd")))


def writer_that_does_not_look(parent: Any, count: int) -> str:
    """Looks at none of ``count`` connections to its ROUTER until it ends. Returns that it did."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    writing = Writing(context())
    held, entered = threading.Event(), threading.Event()

    def look_at_nothing(now: float) -> None:
        entered.set()
        held.wait()

    writing.network._turn = look_at_nothing  # type: ignore[method-assign]
    writing.network.post()
    entered.wait()
    for _ in range(count):  # two events each and more, where 2000 have room
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + writing.network._door.endpoint)
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    writing.network.end(0)
    held.set()
    writing.network.join(None)
    return "ended"


WHO = {
    "boot_id": "another host",
    "pid_ns": "",
    "net_ns": "",
    "pid": 77,
    "start_time": 0,
    "host": "example",
    "label": "",
}


def joining(**given: Any) -> dict[str, Any]:
    """What a reader says first."""
    return {"version": 1, "who": WHO, "patience_s": 10.0, **given}


def address_of(data: Mapping[str, Any]) -> tuple[str, int]:
    """Where the writer listens."""
    host, _, port = str(data["address"]).rpartition(":")
    return host.strip("[]"), int(port)


class Wire:
    """Carries bytes between a reader and the writer, until it is cut."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        here = f"127.0.0.1:{self._listening.getsockname()[1]}"
        there = str(data["address"])
        self.data = {**data, "address": here, "contact": data["contact"].replace(there, here)}
        self._there = address_of(data)
        self._ends: list[socket.socket] = []
        self.heard = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        one, _ = self._listening.accept()
        other = socket.create_connection(self._there)
        self._ends += [one, other]
        threading.Thread(target=self._carry, args=(one, other, self.heard), daemon=True).start()
        self._carry(other, one, bytearray())

    def _carry(self, source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        try:
            while data := source.recv(65536):
                heard += data
                target.sendall(data)
        except OSError:
            return

    def cut(self) -> None:
        self._listening.close()
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
            end.close()
