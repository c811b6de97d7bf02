"""The store "host" in a process that reaches it over a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvplug import PeerGoneError, UnsupportedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    GetJob,
    Job,
    JobEngine,
    JobTask,
    MissReason,
    PageEvent,
    PageRequest,
    PageSeal,
    Presence,
    PutReason,
    Series,
    Store,
    Timeout,
    Usage,
    close_after_fork,
)
from kvplug_host import protocol
from kvplug_host.client.connection import Connection
from kvplug_host.client.mapped_get import MappedGet
from kvplug_host.client.piped_get import PipedGet
from kvplug_host.client.remote_put import RemotePut
from kvplug_host.client.requests import Question, Requests
from kvplug_host.client.subscriptions import Subscriptions
from kvplug_host.options import HostOptions

NAME: Final = "host"
_CLOSE_S: Final = 5.0
_NOT_CONNECTED: Final = Requests()

T = TypeVar("T")


class HostClient(Store):
    """One end over one link. When the other process is gone, everything is a miss: it is lost."""

    def __init__(self, context: Store.Context, link: Store.Link | None) -> None:
        """Owns the link from here on. ``None``: it is connected later, by :meth:`_connect_over`.

        Raises:
            WireError: the other end serves no store "host", or another version of it.
            TimeoutError, PeerGoneError, ClosedError: the other end does not answer.
        """
        options: HostOptions = context.options if context.options is not None else HostOptions()
        self.seal = PageSeal(checksums=context.seal.checksums)
        self._context = context
        self._usage = Usage(num_pages=0, used_bytes=0, budget_bytes=None)
        self._connection: Connection | None = None
        """The latest one, which may be lost."""
        self._is_closed = False
        self._jobs = JobEngine(NAME, options.threads, stop=self._give_up)
        self._subscriptions = Subscriptions()
        if link is not None:
            self._connect_over(link, Deadline.after(context.timeout_s))
        close_after_fork(self)

    def __repr__(self) -> str:
        connection = self._connection
        state = ", closed" if self._jobs.is_closing else "" if self._is_connected else ", gone"
        return f"<store 'host' of {connection.peer if connection is not None else self.location}{state}>"

    def _connect_over(self, link: Store.Link, deadline: Deadline) -> None:
        try:
            connection = Connection(
                link,
                self._context,
                deadline,
                note_usage=self._note_usage,
                lost=self._lost,
                stop=self._give_up,
            )
        except BaseException:
            link.close()
            raise
        self._connection = connection
        self._subscriptions.move_to(connection.requests)
        try:
            connection.begin()
            self._jobs.check_open()  # it may have been closed meanwhile
        except BaseException:
            connection.give_up(MissReason.CLOSED)
            connection.release()
            raise

    @property
    def _is_connected(self) -> bool:
        connection = self._connection
        return connection is not None and not connection.is_lost

    @property
    def epoch(self) -> str:
        """Identifies the run of the store."""
        return self._connection.epoch if self._connection is not None else ""

    @property
    def _route(self) -> str:
        connection = self._connection
        return connection.route if connection is not None and not connection.is_lost else "not at all"

    @property
    def _requests(self) -> Requests:
        return self._connection.requests if self._connection is not None else _NOT_CONNECTED

    def _note_usage(self, usage: Usage) -> None:
        self._usage = usage

    # -- jobs ----------------------------------------------------------------------------------

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._context.timeout_s)

    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._jobs.check_open()

        def presences(answer: protocol.Results, count: int) -> list[Presence]:
            protocol.check_count(answer.codes, count)
            return protocol.results_in(protocol.PRESENCES, answer.codes)

        lease_s = protocol.for_wire(lease_s)
        self._query(job, Presence.ABSENT, keys, presences, protocol.Lookup, lease_s=lease_s)
        return job

    def _remove(self, keys: Sequence[bytes] | None, timeout: Timeout) -> Job[bool]:
        self._jobs.check_open()
        if keys is None:
            raise UnsupportedError("other programs keep pages in this store, too")
        job: Job[bool] = Job(len(keys), self._deadline(timeout))
        for task in self._jobs.tasks():
            if isinstance(task, RemotePut):
                task.forget(keys)
        self._query(job, False, keys, lambda answer, count: [True] * count, protocol.Remove)
        return job

    def _query(
        self,
        job: Job[T],
        unknown: T,
        keys: Sequence[bytes],
        results: Callable[[Any, int], Sequence[T]],
        kind: type[protocol.OfKeys],
        **more: Any,
    ) -> None:
        """Send requests about these keys. ``results(answer, count)``: the results of so many keys."""
        batches, requests = protocol.key_batches(keys), self._requests
        question = Question(job, unknown, len(batches))
        self._start(question, requests)
        for number, batch in enumerate(batches):
            at, count = number * protocol.MAX_KEYS, len(batch) // protocol.KEY_BYTES

            def take(answer: Any, at: int = at, count: int = count) -> None:
                question.answer(at, results(answer, count))

            requests.query(kind(id=requests.new_number(), keys=batch, **more), question, take)

    def _start(self, task: JobTask, requests: Requests) -> None:
        task.job.add_done_callback(lambda _: self._ended(task, requests))
        if self._jobs.begin(task) and task.job.count == 0:
            task.end(None)

    def _ended(self, task: JobTask, requests: Requests) -> None:
        requests.ended(task)

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._jobs.check_open()
        if job.count > protocol.MAX_KEYS:
            raise ValueError(f"a request for {job.count} pages; the most are {protocol.MAX_KEYS}")
        connection = self._connection
        mapping = connection.mapping if connection is not None else None
        if not job.count:
            job.set([])
        elif connection is not None and mapping is not None:
            get = MappedGet(job, pages, self.seal, connection=connection, mapping=mapping, again=self._work)
            self._start(get, connection.requests)
            get.request_places()
        elif connection is not None and connection.pages is not None:
            piped = PipedGet(
                job,
                pages,
                self.seal,
                connection.note_wrong,
                connection.requests,
                fills_blocks=connection.pages.pipe.fills_blocks,
            )
            self._start(piped, connection.requests)
            connection.pages.request(piped)
        else:
            job.set([MissReason.STORE_GONE] * job.count)
        return job

    def _work(self, task: JobTask) -> None:
        if not self._jobs.add(task):
            task.end(self._requests.over or MissReason.STORE_GONE)

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._jobs.check_open()
        connection = self._connection
        if connection is None or connection.is_lost:
            job.set([PutReason.STORE_GONE] * job.count)
        elif connection.pages is None:
            job.set([PutReason.READ_ONLY] * job.count)
        else:
            put = RemotePut(
                job,
                pages,
                self.seal,
                requests=connection.requests,
                turns=connection.put_turns,
                send=connection.pages.send_rows,
                again=self._work,
            )
            self._start(put, connection.requests)
            put.announce()
        return job

    # -- at once -------------------------------------------------------------------------------

    def _notify(self, keys: Sequence[bytes], kind: type[protocol.OfKeys], **more: Any) -> None:
        self._jobs.check_open()
        for batch in protocol.key_batches(keys):
            self._requests.notify(kind(keys=batch, **more))

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        for_s = protocol.for_wire(self._deadline(timeout).remaining())
        self._notify(keys, protocol.Declare, series=series.id, for_s=for_s)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._notify(keys, protocol.Withdraw)

    def release(self, keys: Sequence[bytes]) -> None:
        self._notify(keys, protocol.Release)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._notify(keys, protocol.Touch)

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        self._notify(keys, protocol.Expect)

    def keys(self, series: Series) -> Sequence[bytes]:
        self._jobs.check_open()
        found: list[bytes] = []
        job: Job[bool] = Job(1, self._deadline(DEFAULT_TIMEOUT))
        question, requests = Question(job, False, 1), self._requests

        def take(answer: protocol.Listed) -> None:
            found.extend(protocol.split(answer.keys))
            if answer.is_last:
                question.answer(0, [True])

        self._start(question, requests)
        requests.query(protocol.List(id=requests.new_number(), series=series.id), question, take)
        if not job.wait()[0]:
            raise PeerGoneError("the store did not list its keys: it is gone, or does not answer")
        return found

    def usage(self) -> Usage:
        self._jobs.check_open()
        return self._usage

    @property
    def has_events(self) -> bool:
        return True

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        self._jobs.check_open()
        return self._subscriptions.add(listener)

    # -- the end -------------------------------------------------------------------------------

    def _lost(self, waiting: set[JobTask]) -> None:
        """The store is gone: its requests under way are misses."""
        reason = MissReason.CLOSED if self._is_closed else MissReason.STORE_GONE
        waiting.update(task for task in self._jobs.tasks() if task.is_put)
        for task in waiting:
            task.end(reason)
        if not self._is_closed:
            self._subscriptions.lose()

    @property
    def is_lost(self) -> bool:
        return self._jobs.is_closing or not self._is_connected

    def _close(self, timeout: Timeout) -> None:
        self._jobs.close(self._deadline(timeout))
        self._abort()

    def _give_up(self) -> bool:
        """End every job, and have the threads end. Does not wait. Returns whether it was the first call."""
        self._is_closed = True
        reason = self._requests.over or MissReason.CLOSED  # of one that is gone: that it is gone
        is_first = self._jobs.give_up(reason)
        self._subscriptions.end()
        if self._connection is not None:
            self._connection.give_up(reason)
        return is_first

    def _abort(self) -> None:
        if self._give_up():
            self._drop_connection()
            self._jobs.join(Deadline.after(_CLOSE_S))

    def _drop_connection(self) -> None:
        """End the connection, and wait for its threads. Its requests are misses."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.give_up(MissReason.STORE_GONE)
            connection.release()
            connection.join(Deadline.after(_CLOSE_S))

    def _after_fork_in_child(self) -> None:
        self._is_closed = True
        self._subscriptions.end()
