"""Queues "shm" for tests: both ends here, or one of them in a real child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvplug import KvplugError
from kvplug.net.trust.credentials import Secret
from kvplug.transport import Connection, Credentials, Deadline, QueueEndpoint
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.options import ShmQueueOptions
from kvplug_shm.queue import join
from kvplug_shm.queue.endpoint import ShmQueueEndpoint
from kvplug_shm.queue.ring_buffer import ShmRingBuffer
from kvplug_shm.ring import protocol
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.resources import Resources
from kvplug_testing.waits import until

PATIENCE_S = 30.0
CHUNK = 1 << 16
CHUNKS = 4
SECRET = Credentials(Secret("a secret that these tests share"))


def endpoint(*, options: dict[str, Any] | None = None, **context: Any) -> ShmQueueEndpoint:
    usual = {
        "options": ShmQueueOptions(**options or {}),
        "credentials": Credentials(),
        "max_chunk_bytes": CHUNK,
        "max_chunks": CHUNKS,
        "timeout_s": PATIENCE_S,
    }
    if context.get("local_reader_ranks") == ():  # all are on the network
        usual |= {"host": "127.0.0.1", "credentials": SECRET}
    return ShmQueueEndpoint(QueueEndpoint.Context(**{**usual, **context}))


@pytest.fixture
def queue() -> Iterator[Callable[..., Any]]:
    """Makes the ends of a queue, all of this process: (writer, readers)."""
    with ExitStack() as stack:

        def make(n_reader: int = 1, attached: int | None = None, **given: Any) -> Any:
            end = endpoint(n_reader=n_reader, **given)
            writer = end.create()
            stack.callback(writer.abort)
            handle = writer.export_handle()
            readers = []
            for rank in range(n_reader if attached is None else attached):
                readers.append(end.create_from_handle(handle, rank))
                stack.callback(readers[-1].abort)
            return writer, readers

        yield make


@pytest.fixture
def child(fork_server: ForkServer) -> Iterator[Callable[..., peers.Peer]]:
    """Starts a child with one end of a queue, which does what the function of that name below says.

    ``handle``: of the writer, for a reader; None: the child is the writer. ``given``: its context.
    """
    with ExitStack() as stack:

        def start(
            what: str, handle: QueueEndpoint.Handle | None = None, *args: Any, rank: int = 0, **given: Any
        ) -> peers.Peer:
            plain = None if handle is None else handle.as_plain()
            made = fork_server.start(
                f"{__file__}:run_end", plain, rank, what, list(args), given, timeout_s=4 * PATIENCE_S
            )
            stack.enter_context(made)
            assert handle is None or made.recv() == "attached"
            return made

        yield start


@contextmanager
def joining(
    handle: QueueEndpoint.Handle, contact: str, credentials: Credentials | None = None
) -> Iterator[tuple[JoiningPeer, str]]:
    """A connection to the writer that has proved itself, and the queue to ask for. The test closes it."""
    given = credentials or Credentials()
    connection = Connection.dial(handle.data[contact], given, join.PURPOSE, PATIENCE_S)
    with closing(JoiningPeer(connection, PATIENCE_S, Deadline.after(PATIENCE_S))) as peer:
        yield peer, handle.data["queue"]


@pytest.fixture
def memory_of() -> Iterator[Callable[[Any, int], ShmRingBuffer]]:
    """Makes the memory of a queue, as a process has it that has joined as that rank, and then died."""
    with ExitStack() as stack:

        def make(writer: Any, rank: int) -> ShmRingBuffer:
            with joining(writer.export_handle(), "contact") as (peer, queue):
                _, sizes = join.ask(peer, queue, rank, shares_memory=True)
                ring = ShmRingBuffer.attach(sizes, peer.fds[0])
                join.confirm(peer)
                join.hang_up(peer.connection)
            until(lambda: writer.readers[rank].gone)
            stack.callback(ring.close)
            return ring

        yield make


def evict(ring: ShmRingBuffer, reader: int) -> None:
    """As the writer does, for the reader with that index."""
    ring.words.words[protocol.evicted(reader)] = 1
    ring.words.wake(protocol.HEAD)


def evil(path: Path) -> bytes:
    """A protocol-0 pickle, written by hand: ``builtins.open(path, "w")``."""
    return f"cbuiltins\nopen\n(V{path}\nVw\ntR.".encode()


def num_memories() -> int:
    """Descriptors of queues' memory that this process has open: a writer's, while it hands it out."""
    return sum("memfd:kvplug-queue" in each for each in Resources.of().descriptors)


def num_mapped() -> int:
    """How many mappings of queues this process has."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("kvplug-queue")


# -- in a child ----------------------------------------------------------------------------------------


def run_end(
    parent: peers.Parent,
    plain: Any,
    rank: int,
    what: str,
    args: list[Any],
    given: dict[str, Any],
) -> Any:
    if plain is None:
        with endpoint(**given).create() as end:
            return globals()[what](parent, end, *args)
    with endpoint(**given).create_from_handle(QueueEndpoint.Handle.from_plain(plain), rank) as end:
        parent.send("attached")
        return globals()[what](parent, end, *args)


def sit(parent: peers.Parent, reader: Any) -> None:
    """Do nothing until the parent sends a value."""
    parent.recv(None)


def read_until_the_end(parent: peers.Parent, reader: Any) -> list[Any]:
    """When the parent sends a value, read everything. Returns it, bytes by their number, and the end."""
    parent.recv(None)
    found: list[Any] = []
    try:
        while True:
            value = reader.dequeue()
            found.append(len(value) if isinstance(value, bytes) else value)
    except KvplugError as e:
        return [*found, f"{type(e).__name__}: {e}"]


def write(parent: peers.Parent, writer: Any, count: int) -> None:
    """Send the handle, then ``count`` numbers when the parent sends a value, and stay."""
    parent.send(writer.export_handle().as_plain())
    parent.recv(None)
    for number in range(count):
        writer.enqueue(number)
    parent.send("sent")
    parent.recv(None)
