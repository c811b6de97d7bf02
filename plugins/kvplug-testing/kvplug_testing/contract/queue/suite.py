"""The base of the queue suite: queues with readers in this process, and ends in other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from kvplug.transport import Credentials, Kind, MessageQueue, QueueContext, QueueEndpoint, QueueHandle
from kvplug_testing import peers, waits
from kvplug_testing.comparison import difference
from kvplug_testing.contract.base import Contract
from kvplug_testing.contract.suite_ref import name_of, named, suite_from_ref
from kvplug_testing.waits import Call

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
CHUNKS = 4
"""The default number of chunks of the tested queues."""
QUICK_BYTES = 8 * MIB
"""The largest value at level quick."""


LIFE_S = 300.0
"""The time limit of a process with an end: longer than any test. It ends with its test."""


class QueueEnds(NamedTuple):
    """The ends of one queue in this process."""

    writer: MessageQueue
    readers: list[MessageQueue]


class QueueSuite(Contract):
    """The subject, and how its ends are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.QUEUE
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: what counts where a call says nothing."""
    most_bytes: ClassVar[int] = 64 * MIB
    """The largest value that is tried, at level quick no more than 8 MiB; a queue that carries no more says
    so here."""
    over_network: ClassVar[bool] = False
    """Whether readers are reached as if memory did not reach them: the context's `local_reader_ranks` are
    none."""

    def make_endpoint(self, context: QueueContext) -> QueueEndpoint:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.installed("make_endpoint").load_factory()(context)  # type: ignore[no-any-return]

    # -- ends in this process ------------------------------------------------------------------

    def endpoint(self, **context: Any) -> QueueEndpoint:
        """``context``: fields of the :class:`QueueContext` that differ from this suite's defaults."""
        usual = {
            "credentials": Credentials(),
            "max_chunk_bytes": CHUNK,
            "max_chunks": CHUNKS,
            "timeout_s": self.timeout_s,
            "local_reader_ranks": () if self.over_network else None,
        }
        return self.make_endpoint(QueueContext(options=self.made_options(), **{**usual, **context}))

    def writer(self, n_reader: int = 1, **context: Any) -> MessageQueue:
        """The writer's end of a new queue."""
        made = self.endpoint(n_reader=n_reader, **context).create()
        self.later(made.abort)
        return made

    def reader(self, writer: MessageQueue, rank: int = 0, **context: Any) -> MessageQueue:
        """A reader of the writer's queue, in this process."""
        made = self.attach(writer.export_handle(), rank, **context)
        self.later(made.abort)
        return made

    def attach(self, handle: QueueHandle, rank: int = 0, **context: Any) -> MessageQueue:
        """A reader that must attach in time; the caller ends it."""
        end = self.endpoint(**context)
        within = waits.patience_s
        call = Call(lambda: end.create_from_handle(handle, rank, timeout=within))
        return call.result(within + 1)  # type: ignore[no-any-return]

    def queue(self, n_reader: int = 1, **context: Any) -> QueueEnds:
        """A queue to which all readers have attached."""
        writer = self.writer(n_reader, **context)
        return QueueEnds(writer, [self.reader(writer, rank, **context) for rank in range(n_reader)])

    def warm_up(self) -> None:
        """Run one large operation: torch starts its threads then and keeps them."""
        with contextlib.suppress(ImportError):
            import torch

            torch.ones(1 << 20).add_(1)

    # -- ends in other processes ---------------------------------------------------------------

    @property
    def other_processes(self) -> str:
        """For ``needs``. An endpoint's class may say ``in_one_process``, as the fake of the kit does."""
        if self.spec is not None and getattr(self.spec.load_factory(), "in_one_process", False):
            return f"the ends of {self.called} are in one process (in_one_process)"
        return super().other_processes

    def remote_reader(
        self, writer: MessageQueue, rank: int, what: Callable[..., Any], *args: Any, **context: Any
    ) -> peers.Peer:
        """A child process that attaches as reader ``rank`` and runs ``what(parent, queue, *args)``.

        ``what`` is a function at the top level of a file.
        """
        handle = writer.export_handle().as_plain()
        of_it = (self.suite_ref(), context, handle, rank)
        return self.start_forked(
            f"{__name__}:_remote_reader", *of_it, name_of(what), list(args), timeout_s=LIFE_S
        )

    def remote_writer(
        self, n_reader: int, what: Callable[..., Any], *args: Any, **context: Any
    ) -> tuple[QueueHandle, peers.Peer]:
        """A child process with the writer's end that runs ``what(parent, queue, *args)``. Returns its
        handle too.
        """
        of_it = (self.suite_ref(), {"n_reader": n_reader, **context})
        child = self.start_forked(
            f"{__name__}:_remote_writer", *of_it, name_of(what), list(args), timeout_s=LIFE_S
        )
        return QueueHandle.from_plain(child.recv()), child


def _remote_reader(
    parent: peers.Parent,
    suite_ref: dict[str, Any],
    context: dict[str, Any],
    handle: dict[str, Any],
    rank: int,
    where: str,
    args: list[Any],
) -> Any:
    suite = suite_from_ref(suite_ref)
    with suite.endpoint(**context).create_from_handle(QueueHandle.from_plain(handle), rank) as queue:
        return named(where)(parent, queue, *args)


def _remote_writer(
    parent: peers.Parent, suite_ref: dict[str, Any], context: dict[str, Any], where: str, args: list[Any]
) -> Any:
    with suite_from_ref(suite_ref).endpoint(**context).create() as queue:
        parent.send(queue.export_handle().as_plain())
        return named(where)(parent, queue, *args)


# -- calls that must end in time ---------------------------------------------------------------


def sent(writer: MessageQueue, value: object) -> None:
    """Enqueue a value, which must end in time."""
    within = waits.patience_s
    Call(lambda: writer.enqueue(value, timeout=within)).result(within + 1)


def received(reader: MessageQueue) -> Any:
    """The next value, which must arrive in time."""
    within = waits.patience_s
    return Call(lambda: reader.dequeue(timeout=within)).result(within + 1)


def all_received(reader: MessageQueue, count: int) -> Call:
    """Read ``count`` values in a separate thread; fewer if one does not arrive in time."""
    within = waits.patience_s
    return Call(lambda: [reader.dequeue(timeout=within) for _ in range(count)])


def fill(writer: MessageQueue, most: int = 10_000) -> int:
    """Enqueue 0, 1, 2, ... until there is no room. Returns the number of accepted values."""
    from kvplug import TimeoutError

    def clog() -> int:
        for number in range(most):
            try:
                writer.enqueue(number, timeout=0.2)
            except TimeoutError:
                return number
        raise AssertionError(f"{most} messages were accepted, and none has been read: there is no bound")

    return Call(clog).result(waits.patience_s + 10)  # type: ignore[no-any-return]


def wrong(got: Iterable[Any], wanted: Iterable[Any]) -> str:
    """A description of how the received values differ; empty if they are equal."""
    got, wanted = list(got), list(wanted)
    for at, (ours, theirs) in enumerate(zip(wanted, got, strict=False)):
        if other := difference(ours, theirs):
            return f"message {at + 1:,} of {len(wanted):,}: {other}"
    if len(got) != len(wanted):
        return f"{len(wanted):,} messages were sent, and {len(got):,} received"
    return ""
