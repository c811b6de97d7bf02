"""The base of the queue suite: queues with readers in this process, and ends in other processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from kvplug import KvplugError, TimeoutError
from kvplug.transport import Credentials, Kind, MessageQueue, QueueContext, QueueEndpoint, QueueHandle
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import Contract
from kvplug_testing.contract.ends import fields_of
from kvplug_testing.contract.suite_ref import name_of, named, suite_from_ref
from kvplug_testing.waits import Call

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
CHUNKS = 4
"""The default number of chunks of the tested queues."""
_LIFE_S = 300.0
"""The time limit of a process with an end: longer than any test. It ends with its test."""


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
        return self.attach(writer.export_handle(), rank, **context)

    def attach(self, handle: QueueHandle, rank: int = 0, **context: Any) -> MessageQueue:
        """A reader that must attach in time."""
        end = self.endpoint(**context)
        call = Call(lambda: end.create_from_handle(handle, rank, timeout=waits.patience_s))
        made: MessageQueue = call.result(waits.patience_s + 1)
        self.later(made.abort)
        return made

    def queue(self, n_reader: int = 1, **context: Any) -> tuple[MessageQueue, list[MessageQueue]]:
        """The writer of a queue, and its readers, all of which have attached."""
        writer = self.writer(n_reader, **context)
        return writer, [self.reader(writer, rank, **context) for rank in range(n_reader)]

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

    def remote_reader(self, handle: QueueHandle, rank: int, **context: Any) -> RemoteEnd:
        """The reader of that rank in another process, on the host ``at_host`` if there is one. It has
        attached.
        """
        return self._remote(context, handle.as_plain(), rank)[0]

    def remote_writer(self, n_reader: int, **context: Any) -> tuple[QueueHandle, RemoteEnd]:
        """The writer in another process, on the host ``at_host`` if there is one, and its handle."""
        end, handle = self._remote({"n_reader": n_reader, **context})
        return QueueHandle.from_plain(handle), end

    def _remote(self, context: dict[str, Any], *handle_and_rank: Any) -> tuple[RemoteEnd, Any]:
        """An end that is ready, and its handle."""
        start = (
            functools.partial(self.start_at, context["at_host"])
            if "at_host" in context
            else self.start_forked
        )
        arguments = (f"{__name__}:_run_end", self.suite_ref(), context, *handle_and_rank)
        end = RemoteEnd(start(*arguments, timeout_s=_LIFE_S))
        return end, end.result()


class RemoteEnd:
    """An end in another process, which runs functions ``what(parent, queue, *args)``, one after the other."""

    def __init__(self, child: peers.Peer) -> None:
        self.child = child

    def begin(self, what: Callable[..., Any], *args: Any) -> RemoteEnd:
        """Begin to run ``what``, a function at the top level of a file."""
        self.child.send([name_of(what), *args])
        return self

    def result(self) -> Any:
        """What it sends next, or its function returns."""
        error, value = self.child.recv(2 * waits.patience_s)
        assert not error, f"{self.child!r}: {error}: {value}"
        return value

    def run(self, what: Callable[..., Any], *args: Any) -> Any:
        """What the function returns."""
        return self.begin(what, *args).result()


def _run_end(
    parent: peers.Parent,
    suite_ref: dict[str, Any],
    context: dict[str, Any],
    handle: Any = None,
    rank: int = 0,
) -> None:
    """In another process: the writer's end, or with a handle a reader's. Runs functions without end."""
    endpoint = suite_from_ref(suite_ref).endpoint(**fields_of(context))
    if handle is None:
        queue = endpoint.create()
    else:
        queue = endpoint.create_from_handle(QueueHandle.from_plain(handle), rank, timeout=waits.patience_s)
    parent.send(["", queue.export_handle().as_plain()])
    with queue:
        while True:
            name, *args = parent.recv(None)
            try:
                parent.send(["", named(name)(parent, queue, *args)])
            except KvplugError as e:
                parent.send([type(e).__name__, str(e)])


# -- calls that must end in time ---------------------------------------------------------------


def sent(writer: MessageQueue, value: object) -> None:
    """Enqueue a value, which must end in time."""
    Call(lambda: writer.enqueue(value, timeout=waits.patience_s)).result(waits.patience_s + 1)


def received(reader: MessageQueue) -> Any:
    """The next value, which must arrive in time."""
    return Call(lambda: reader.dequeue(timeout=waits.patience_s)).result(waits.patience_s + 1)


def all_received(reader: MessageQueue, count: int) -> Call:
    """Read ``count`` values in a separate thread; fewer if one does not arrive in time."""
    return Call(lambda: [reader.dequeue(timeout=waits.patience_s) for _ in range(count)])


def fill(writer: MessageQueue) -> int:
    """Enqueue 0, 1, 2, ... until there is no room. Returns the number of accepted values."""
    for number in range(10_000):
        call = Call(lambda number=number: writer.enqueue(number, timeout=0.2)).end()  # type: ignore[misc]
        if isinstance(call.error, TimeoutError):
            return number
        call.result()
    raise AssertionError("there is no bound to the messages that nobody has read")
