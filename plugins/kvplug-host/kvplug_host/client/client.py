"""The store "host" in a process that reaches it over a link."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvplug import (
    ClosedError,
    HandshakeError,
    KvplugError,
    PeerGoneError,
    TransportError,
    UnsupportedError,
)
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BackgroundThread,
    Deadline,
    GetJob,
    Job,
    JobEngine,
    JobTask,
    MissReason,
    NamedExhaustion,
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
from kvplug_host.client.asking import Question
from kvplug_host.client.mapped_get import MappedGet
from kvplug_host.client.mapping import Mapping, offered_mapping
from kvplug_host.client.page_pipe import PagePipe
from kvplug_host.client.piped_get import PipedGet
from kvplug_host.client.remote_put import RemotePut, Reserved
from kvplug_host.client.requests import Answer, Requests
from kvplug_host.client.subscriptions import Subscriptions
from kvplug_host.options import HostOptions
from kvplug_host.outbox import Outbox
from kvplug_host.protocol import Op

_log = logging.getLogger(__name__)

NAME: Final = "host"
_CLOSE_S: Final = 5.0

T = TypeVar("T")


class HostClient(Store):
    """One end over one link. When the other process is gone, everything is a miss: it is lost."""

    def __init__(
        self,
        context: Store.Context,
        link: Store.Link,
        *,
        deadline: Deadline | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Owns the link from here on.

        Args:
            deadline: for the first messages; default: the context's ``timeout_s``.
            on_lost: called when the other process is gone.

        Raises:
            WireError: the other end serves no store "host", or another version of it.
            TimeoutError, PeerGoneError, ClosedError: the other end does not answer.
        """
        options: HostOptions = context.options if context.options is not None else HostOptions()
        self.seal = PageSeal(checksums=context.seal.checksums)
        self._timeout_s = context.timeout_s
        self._link = link
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._is_closed = self._is_gone = False
        self._pages: PagePipe | None = None
        self._mapping: Mapping | None = None
        self._jobs = JobEngine(NAME, options.threads, stop=self._give_up)
        self._outbox = Outbox(link.channel, "kvplug-host")
        self._requests = Requests(self._outbox)
        self._subscriptions = Subscriptions(self._requests)
        self._thread = BackgroundThread(self._receive_all, name="kvplug-host-client", stop=self._give_up)
        try:
            self._begin(context, options, deadline or Deadline.after(context.timeout_s))
            with NamedExhaustion("a store in another process"):
                self._thread.start()
        except BaseException:
            self._give_up()
            self._release()
            raise
        close_after_fork(self)

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ", gone" if self._is_gone else ""
        return f"<store 'host' of {self._link.channel.peer}{state}>"

    def _begin(self, context: Store.Context, options: HostOptions, deadline: Deadline) -> None:
        hello = self._link.channel.recv(timeout=deadline.remaining())
        protocol.check_hello(hello, self._link.channel.peer)
        self.epoch = protocol.field(hello, "epoch", str)
        self._usage = protocol.usage_from(hello)
        self._reserved = Reserved(protocol.most_reserved(self._usage.budget_bytes or 0))
        try:
            pipe = self._link.open_pipe(protocol.PIPE, timeout=deadline.remaining())
        except (HandshakeError, TransportError) as e:  # both ends know
            NamedExhaustion.check(e, "a pipe to a store")
            _log.info("there is no pipe to the store of %s: %s", self._link.channel.peer, e)
        else:
            self._pages = PagePipe(pipe, self._requests, stop=self._give_up, failed=self._fail)
        if options.map:
            self._mapping = offered_mapping(hello, context.credentials, deadline)
        _log.info("the store of %s is read: %s", self._link.channel.peer, self.route)

    @property
    def _route(self) -> str:
        if self._mapping is not None:
            return "its memory is mapped"
        pages = self._pages
        return f"over a pipe to {pages.pipe.peer}" if pages is not None else "not at all"

    # -- jobs ----------------------------------------------------------------------------------

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._jobs.check_open()
        question = Question(job, Presence.ABSENT, protocol.num_batches(keys))
        self._ask(question, {"op": Op.LOOKUP, "lease_s": float(lease_s)}, keys, protocol.presences_from)
        return job

    def _remove(self, keys: Sequence[bytes] | None, timeout: Timeout) -> Job[bool]:
        self._jobs.check_open()
        if keys is None:
            raise UnsupportedError("other programs keep pages in this store, too")
        job: Job[bool] = Job(len(keys), self._deadline(timeout))
        for task in self._jobs.tasks():
            if isinstance(task, RemotePut):
                task.forget(keys)
        question = Question(job, False, protocol.num_batches(keys))
        self._ask(question, {"op": Op.REMOVE}, keys, lambda message, count: [True] * count)
        return job

    def _ask(
        self,
        question: Question[T],
        message: dict[str, Any],
        keys: Sequence[bytes],
        results: Callable[[Any, int], Sequence[T]],
    ) -> None:
        """Ask about these keys. ``results(answer, count)``: of so many keys."""

        def answered(at: int, count: int) -> Answer:
            def answer(message: Any) -> None:
                self._usage = protocol.usage_from(message)
                question.answer(at, results(message, count))

            return answer

        self._start(question)
        for number, batch in enumerate(protocol.key_batches(keys)):
            answer = answered(number * protocol.MAX_KEYS, len(batch) // protocol.KEY_BYTES)
            self._requests.ask(self._requests.new_number(), question, {**message, "keys": batch}, answer)

    def _start(self, task: JobTask) -> None:
        task.job.add_done_callback(lambda _: self._ended(task))
        if self._jobs.begin(task) and task.job.count == 0:
            task.end(None)

    def _ended(self, task: JobTask) -> None:
        self._requests.ended(task)

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._jobs.check_open()
        if job.count > protocol.MAX_KEYS:
            raise ValueError(f"a request for {job.count} pages; the most are {protocol.MAX_KEYS}")
        if not job.count:
            job.set([])
        elif (mapping := self._mapping) is not None:
            get = MappedGet(
                job,
                pages,
                self.seal,
                mapping=mapping,
                requests=self._requests,
                wrong=self._wrong,
                again=self._work,
                unmap=self._unmap,
            )
            self._start(get)
            get.ask()
        else:
            self._get_piped(job, pages)
        return job

    def _get_piped(self, job: GetJob, pages: PageRequest) -> None:
        number = self._requests.new_number()
        get = PipedGet(
            job,
            pages,
            self.seal,
            lambda index, reason: self._wrong(pages.keys[index], reason),
            lambda: self._requests.tell({"op": Op.CANCEL, "id": number}),
        )
        self._start(get)
        if self._pages is None or not self._pages.ask(number, get, job, pages):
            get.end(MissReason.STORE_GONE)

    def _work(self, task: JobTask) -> None:
        if not self._jobs.add(task):
            task.end(self._requests.over or MissReason.STORE_GONE)

    def _unmap(self, error: KvplugError) -> None:
        """The memory cannot be had: pages come over the pipe from now on."""
        with self._lock:
            mapping, self._mapping = self._mapping, None
        if mapping is not None:
            if not self._is_gone and not self._is_closed:
                _log.warning("the memory of the store is not mapped any more: %s", error)
            mapping.close()

    def _wrong(self, key: bytes, reason: MissReason, generation: int = 0) -> None:
        _log.warning("the store %r has given a wrong page (%s), which is removed", NAME, reason)
        self._requests.tell({"op": Op.WRONG, "keys": key, "generation": generation})

    # -- puts ----------------------------------------------------------------------------------

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._jobs.check_open()
        page_pipe = self._pages
        if page_pipe is None:
            job.set([PutReason.READ_ONLY] * job.count)
            return job
        put = RemotePut(
            job,
            pages,
            self.seal,
            requests=self._requests,
            reserved=self._reserved,
            send=page_pipe.send_rows,
            note_usage=self._note_usage,
            again=self._work,
        )
        self._start(put)
        put.ask()
        return job

    def _note_usage(self, usage: Usage) -> None:
        self._usage = usage

    # -- at once -------------------------------------------------------------------------------

    def _tell_of_keys(self, op: str, keys: Sequence[bytes], **more: Any) -> None:
        self._jobs.check_open()
        for batch in protocol.key_batches(keys):
            self._requests.tell({"op": op, "keys": batch, **more})

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        for_s = self._deadline(timeout).remaining()
        self._tell_of_keys(Op.DECLARE, keys, series=series.id, for_s=math.inf if for_s is None else for_s)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._tell_of_keys(Op.WITHDRAW, keys)

    def release(self, keys: Sequence[bytes]) -> None:
        self._tell_of_keys(Op.RELEASE, keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._tell_of_keys(Op.TOUCH, keys)

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        self._tell_of_keys(Op.EXPECT, keys)

    def keys(self, series: Series) -> Sequence[bytes]:
        self._jobs.check_open()
        found: list[bytes] = []
        job: Job[bool] = Job(1, self._deadline(DEFAULT_TIMEOUT))
        question, number = Question(job, False, 1), self._requests.new_number()

        def answer(message: Any) -> None:
            found.extend(protocol.keys_of(message, protocol.MAX_LISTED))
            if not protocol.field(message, "more", bool):
                self._requests.forget(number)
                question.answer(0, [True])

        self._start(question)
        self._requests.ask(number, question, {"op": Op.KEYS, "series": series.id}, answer)
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

    # -- what comes ----------------------------------------------------------------------------

    def _receive_all(self) -> None:
        channel = self._link.channel
        try:
            while True:
                self._requests.answered(channel.recv(timeout=None))
        except (PeerGoneError, ClosedError) as e:
            _log.debug("the link to the store has ended: %s", e)
        except KvplugError as e:
            _log.warning("the store of %s is not used any more: %s", channel.peer, e)
        except Exception:
            _log.exception("an answer of the store was not understood: a fault of kvplug")
        self._lose()

    def _fail(self, error: BaseException | None) -> None:
        if error is not None:
            _log.warning("the store of %s is not used any more: %s", self._link.channel.peer, error)
        self._link.close()

    def _lose(self) -> None:
        """The store is gone: what was asked of it is a miss. Copies out of mapped memory go on."""
        reason = MissReason.CLOSED if self._is_closed else MissReason.STORE_GONE
        with self._lock:
            self._is_gone = True
            mapping, self._mapping = self._mapping, None
        waiting = self._requests.end(reason)
        self._link.close()
        self._outbox.end()
        if self._pages is not None:
            waiting.update(self._pages.end())
        waiting.update(task for task in self._jobs.tasks() if task.is_put)
        if mapping is not None:
            mapping.close()
        for task in waiting:
            task.end(reason)
        if not self._is_closed:
            self._subscriptions.lose()
        self._on_lost()

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._jobs.is_closing or self._is_gone

    def _close(self, timeout: Timeout) -> None:
        self._jobs.close(self._deadline(timeout))
        self._abort()

    def _give_up(self) -> bool:
        """End every job, and have the threads end. Does not wait. Returns whether it was the first call."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            reason = self._requests.over or MissReason.CLOSED  # of one that is gone: that it is gone
            self._jobs.give_up(reason)
            self._requests.end(reason)
            self._subscriptions.end()
            self._link.close()
        return is_first

    def _abort(self) -> None:
        if self._give_up():
            self._release()
            self._join(Deadline.after(_CLOSE_S))

    def _release(self) -> None:
        """After :meth:`_give_up`."""
        if self._pages is not None:
            self._pages.end()
        if self._mapping is not None:
            self._mapping.close()

    def _join(self, deadline: Deadline) -> None:
        self._outbox.end()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(deadline.remaining())
        if self._pages is not None:
            self._pages.join(deadline)
        self._jobs.join(deadline)
        self._mapping = None

    def _after_fork_in_child(self) -> None:
        self._is_closed = True
        self._subscriptions.end()
