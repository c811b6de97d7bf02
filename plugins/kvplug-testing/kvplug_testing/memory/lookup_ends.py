"""What both ends of a lookup buffer "memory" do alike, and the end that reaches a store of this process.

The signal pipe carries one message, the number of what was attached. Calls go straight to the store; key,
value and hidden states of what it lends come over the data pipe, so that a slow or broken pipe does here what
it does to any lookup buffer. One thread waits for the end of the signal pipe, another one carries entries.
"""

from __future__ import annotations

import abc
import queue
import secrets
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug.errors import ClosedError, KvplugError, PeerGoneError, TimeoutError, UnsupportedError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.fork import close_after_fork
from kvplug.transport.lookup import Entry, EntrySink, LookupBuffer
from kvplug.transport.pipe import Pipe
from kvplug_testing.memory.entries import copy_of, extra_bytes, give_layers, key_under

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug_testing.memory.lookup import Loan, MemoryStore

Parts = list["Tensor | None"]


@attrs.frozen(eq=False)
class Attached:
    """A store, and its ends of two pipes."""

    store: MemoryStore
    signal: Pipe
    data: Pipe
    number: int = attrs.field(factory=lambda: secrets.randbits(62))

    def announce(self) -> None:
        import torch

        _attached[self.number] = self
        self.signal.send_tensor(torch.tensor(self.number))

    def end(self) -> None:
        """At once. Idempotent."""
        _attached.pop(self.number, None)
        self.store.forget(self)
        self.signal.abort()
        self.data.abort()


_attached: Final[dict[int, Attached]] = {}


@attrs.define(eq=False)
class Job:
    """An entry that is to come over the data pipe."""

    entry: Entry
    parts: Parts | None = None


class MemoryLookupBuffer(LookupBuffer):
    """What both ends do: the store lends an entry, the caller's end carries it, and the lease ends."""

    _timeout_s: float

    @abc.abstractmethod
    def _calling(self, deadline: Deadline) -> AbstractContextManager[MemoryStore]:
        """The store, for one call."""

    @abc.abstractmethod
    def _carried(self, entry: Entry, deadline: Deadline) -> Entry:
        """A copy of an entry of the store, for the caller at this end."""

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def match(self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
        key = key_under(input_tokens, roi)
        with self._calling(self._deadline(DEFAULT_TIMEOUT)) as store:
            return store.count_shared(key, extra_bytes(extra))

    def drop_select(
        self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"", timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Entry:
        deadline = self._deadline(timeout)
        key = None if input_tokens is None else key_under(input_tokens, roi)
        with self._calling(deadline) as store:
            loan = store.lend_oldest(key, extra_bytes(extra), deadline, lambda: self.is_lost)
            return self._hand_over(store, loan, None, deadline)

    def select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        min_tokens: int = 1,
        sink: EntrySink | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = self._deadline(timeout)
        key = key_under(input_tokens, roi)
        with self._calling(deadline) as store:
            loan = store.lend_longest(key, extra_bytes(extra), min_tokens)
            return self._hand_over(store, loan, sink, deadline)

    def _hand_over(self, store: MemoryStore, loan: Loan, sink: EntrySink | None, deadline: Deadline) -> Entry:
        has_it = False
        try:
            entry = self._carried(loan.held.entry, deadline)
            if sink is not None:
                entry = give_layers(entry, sink, deadline)
            has_it = True
        finally:
            self._let_go_of(store, loan, has_it)
        return entry

    def _let_go_of(self, store: MemoryStore, loan: Loan, has_it: bool) -> None:
        store.end(loan, taken=has_it)


class MemoryReachingEnd(MemoryLookupBuffer):
    """Any method may be called from any thread, and several at once. Entries are inserted elsewhere."""

    def __init__(self, signal: Pipe, data: Pipe, *, timeout_s: float) -> None:
        self._signal, self._data = signal, data
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards what was attached, how it ended, and parts of jobs
        self._other: Attached | None = None
        self._ended: KvplugError | None = None
        """What every call raises from now on."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        close_after_fork(self)
        self._threads = [
            threading.Thread(target=run, name="kvplug-memory-lookup", daemon=True)
            for run in (self._watch, self._carry_all)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_lost(self) -> bool:
        return self._ended is not None

    def insert(self, *given: Any, **more: Any) -> int:
        self._check()
        raise UnsupportedError("entries are inserted at the end that holds them")

    # -- calls ---------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, deadline: Deadline) -> Iterator[MemoryStore]:
        """The store. What ends a call because this end has ended raises what that raises."""
        with self._changed:
            self._changed.wait_for(lambda: self._other or self._ended, deadline.remaining())
            self._check()
            if self._other is None:
                raise TimeoutError(f"the lookup store at {self._signal.peer} did not show itself in time")
        try:
            yield self._other.store
        except KvplugError as e:
            self._check()
            if isinstance(e, ClosedError):
                raise PeerGoneError(f"the lookup store at {self._signal.peer} has closed") from e
            raise

    def _carried(self, entry: Entry, deadline: Deadline) -> Entry:
        job = Job(entry)
        self._jobs.put(job)
        with self._changed:
            self._changed.wait_for(lambda: job.parts is not None or self.is_lost, deadline.remaining())
            self._check()
            if job.parts is None:
                raise TimeoutError("the entry did not come in time")
        key, value, hidden = job.parts
        return copy_of(attrs.evolve(entry, key=key, value=value, hidden=hidden))

    def _check(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended)) from self._ended
        if self._signal.closed:  # which the thread that watches it is about to find out
            raise PeerGoneError("the signal pipe is closed")

    # -- what comes ----------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            message: Any = self._signal.recv_tensor(timeout=None)
            with self._changed:
                self._other = _attached.get(message.item())
                self._changed.notify_all()
            if self._other is not None:
                self._signal.recv_tensor(timeout=None)
        except KvplugError:
            pass  # which is what was waited for
        self._end(PeerGoneError(f"the lookup store at {self._signal.peer} is not there (any more)"))

    def _carry_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._carry(job)
            except KvplugError as e:
                self._end(PeerGoneError(f"no entry comes from the store at {self._signal.peer}: {e}"))

    def _carry(self, job: Job) -> None:
        """One part after the other: a pipe always has room for one message."""
        assert self._other is not None
        parts: Parts = []
        for part in (job.entry.key, job.entry.value, job.entry.hidden):
            self._other.data.send_tensor(part, timeout=None)
            parts.append(self._data.recv_tensor(timeout=None))
        self._put(job, parts)

    def _put(self, job: Job, parts: Parts) -> None:
        with self._changed:
            job.parts = parts
            self._changed.notify_all()

    # -- ending --------------------------------------------------------------------------------

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        self._end(ClosedError("this end of the lookup buffer is closed"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())

    def abort(self) -> None:
        self._end(ClosedError("this end of the lookup buffer was aborted"))

    def _end(self, error: KvplugError) -> None:
        with self._changed:
            if self._ended is None or isinstance(error, ClosedError):
                self._ended = error
            self._changed.notify_all()
        self._signal.abort()
        self._data.abort()
        if self._other is not None:
            self._other.end()
        self._jobs.put(None)

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # the old one may be held by a thread that is not here
        self._ended = ClosedError("this end of the lookup buffer belongs to the parent of this process")
