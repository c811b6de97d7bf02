"""The lookup buffer "memory": a fake of one process, under one lock and one condition.

A call that waits, for room, for an entry or for a reader to end, waits for "something has changed" and then
looks again. An entry is lent while it is read or handed over. The index is two dicts, of whole keys and of
all their prefixes: few lines, and much memory for long prompts.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import CapacityError, ClosedError, EntryGoneError, TimeoutError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.fork import close_after_fork
from kvplug.transport.context import LookupContext
from kvplug.transport.events import EventLog, RemovalReason, StoreEvent
from kvplug.transport.lease import Lease, Leases
from kvplug.transport.lookup import Entry, EntryHeader, LookupBuffer, LookupEndpoint, LookupStore
from kvplug.transport.pipe import Pipe
from kvplug_testing.memory.entries import Key, checked_tokens, copy_of, extra_bytes, nbytes_of, num_layers_of
from kvplug_testing.memory.lookup_ends import Attached, MemoryLookupBuffer, MemoryReachingEnd

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class MemoryLookupEndpoint(LookupEndpoint):
    """The factory of the spec."""

    def __init__(self, context: LookupContext) -> None:
        self._context = context

    def hold(self, *, as_cache: bool = False) -> LookupStore:
        return MemoryStore(self._context, as_cache=as_cache)

    def reach(self, signal: Pipe, data: Pipe) -> LookupBuffer:
        return MemoryReachingEnd(signal, data, timeout_s=self._context.timeout_s)


@attrs.define(eq=False, kw_only=True)
class Held:
    """An entry, and what the store knows about it."""

    entry: Entry
    extra: bytes
    key: Key
    nbytes: int
    is_up: bool = False
    """Whether it can be found. One that is being handed over cannot."""
    is_gone: bool = False
    """Evicted or cleared: its bytes are given back when the last lease on it ends."""

    @property
    def entry_id(self) -> int:
        return self.entry.header.entry_id


@attrs.frozen(eq=False)
class Loan:
    """An entry lent to one caller: to be read, or (exclusively) to be taken."""

    held: Held
    lease: Lease


class MemoryStore(MemoryLookupBuffer, LookupStore):
    """The end that holds the entries. As a cache, a full one drops the oldest that are not lent."""

    def __init__(self, context: LookupContext, *, as_cache: bool) -> None:
        self._budget = context.buffer_size
        self._timeout_s = context.timeout_s
        self._as_cache = as_cache
        self._changed = threading.Condition()  # guards all that follows
        self._held: dict[int, Held] = {}  # oldest first; those lent are in it
        self._by_prefix: dict[tuple[bytes, Key], dict[int, Held]] = defaultdict(dict)
        self._by_key: dict[tuple[bytes, Key], dict[int, Held]] = defaultdict(dict)
        self._leases = Leases()
        self._used = 0  # bytes of the budget
        self._next_id = 1
        self._num_clears = 0
        self._events = EventLog()
        self._listeners: list[Callable[[StoreEvent], None]] = []
        self._attached: list[Attached] = []
        self._closed = False
        close_after_fork(self)

    @property
    def is_lost(self) -> bool:
        return self._closed

    # -- putting in ----------------------------------------------------------------------------

    def insert(
        self,
        input_tokens: Any,
        roi: Any,
        key: Tensor | None,
        value: Tensor | None,
        hidden: Tensor | None,
        *,
        extra: bytes = b"",
        metadata: dict[str, Any] | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> int:
        num_clears = self._num_clears
        deadline = self._deadline(timeout)
        tokens, mask = checked_tokens(input_tokens, roi)
        if not mask.any():
            raise ValueError("no token of the entry is under its roi: it could never be found")
        num_layers = num_layers_of(len(tokens), key, value)
        nbytes = nbytes_of(len(tokens), key, value, hidden)
        extra = extra_bytes(extra)
        if nbytes > self._budget:
            raise CapacityError(f"an entry of {nbytes} bytes does not fit into a buffer of {self._budget}")
        with self._changed:
            self._wait_for_room(nbytes, num_clears, deadline)
            header = EntryHeader(
                entry_id=self._next_id,
                tokens=tokens,
                roi=mask,
                num_layers=num_layers,
                metadata=metadata or {},
            )
            given = Entry(header=header, tokens=tokens, roi=mask, key=key, value=value, hidden=hidden)
            held = Held(entry=copy_of(given), extra=extra, key=tuple(tokens[mask].tolist()), nbytes=nbytes)
            self._next_id += 1
            self._used += nbytes
            self._held[held.entry_id] = held
            self._put_up(held)
            self._changed.notify_all()
        return held.entry_id

    def _wait_for_room(self, nbytes: int, num_clears: int, deadline: Deadline) -> None:
        while True:
            self._check_open()
            if num_clears != self._num_clears:
                raise EntryGoneError("the store was cleared meanwhile: the entry is not stored")
            if self._make_room(nbytes):
                return
            if deadline.expired:
                raise TimeoutError(
                    f"no room for {nbytes} bytes in time: {self._used} of {self._budget} are used"
                )
            self._changed.wait(deadline.remaining())

    def _make_room(self, nbytes: int) -> bool:
        """Whether there is room. A cache makes some if it can; none goes where that would not do."""
        missing, going = self._used + nbytes - self._budget, []
        for held in self._held.values() if self._as_cache else ():
            if missing > 0 and self._may_be_evicted(held):
                going.append(held)
                missing -= held.nbytes
        if missing <= 0:
            for held in going:
                self._let_go(held, RemovalReason.EVICTED)
        return missing <= 0

    def _may_be_evicted(self, held: Held) -> bool:
        return not self._leases.is_lent(held.entry_id)

    # -- for callers at both ends --------------------------------------------------------------

    @contextmanager
    def _calling(self, deadline: Deadline) -> Iterator[MemoryStore]:
        yield self

    def _carried(self, entry: Entry, deadline: Deadline) -> Entry:
        return copy_of(entry)

    def count_shared(self, key: Key, extra: bytes) -> int:
        with self._changed:
            self._check_open()
            return self._find_longest(key, extra)[0]

    def lend_oldest(
        self, key: Key | None, extra: bytes, deadline: Deadline, given_up: Callable[[], bool]
    ) -> Loan:
        """Hand over the oldest match (any entry where ``key`` is ``None``), now or when one comes.

        Raises:
            TimeoutError: none came, or the caller has ``given_up``; that is asked whenever something changes.
            ClosedError: the store is closed.
        """
        with self._changed:
            while True:
                self._check_open()
                if given_up():
                    raise TimeoutError("the caller has given up")
                held = self._find_oldest(key, extra)
                if held is not None:
                    return self._lend(held, exclusive=True)
                if deadline.expired:
                    raise TimeoutError("no entry that matches came in time")
                self._changed.wait(deadline.remaining())

    def lend_longest(self, key: Key, extra: bytes, min_tokens: int) -> Loan:
        """Lend the entry that shares the longest prefix, to be read.

        Raises:
            EntryGoneError: nothing shares ``min_tokens`` tokens.
        """
        with self._changed:
            self._check_open()
            shared, held = self._find_longest(key, extra)
            if held is None or shared < min_tokens:
                raise EntryGoneError(
                    f"nothing that is held shares {max(1, min_tokens)} tokens with the query"
                )
            return self._lend(held, exclusive=False)

    def _lend(self, held: Held, *, exclusive: bool) -> Loan:
        lease = self._leases.take(held.entry_id, "a caller", exclusive=exclusive)
        if exclusive:
            self._take_down(held, RemovalReason.TAKEN)
        return Loan(held, lease)

    def end(self, loan: Loan, *, taken: bool) -> None:
        """The lease ends. What was lent to be taken is gone if it was ``taken``, else it is back."""
        held = loan.held
        with self._changed:
            self._leases.release(loan.lease)
            if loan.lease.exclusive and taken:
                self._let_go(held, RemovalReason.TAKEN)
            elif loan.lease.exclusive and not held.is_gone:
                self._put_up(held)
            elif held.is_gone and not self._leases.is_lent(held.entry_id):
                self._used -= held.nbytes
            self._changed.notify_all()

    def _find_oldest(self, key: Key | None, extra: bytes) -> Held | None:
        """The oldest that may be taken: any, one that begins with the key, or one that is a prefix of it."""
        if key == ():
            return None
        found = [self._by_prefix.get((extra, key or ()), {})]
        found += [self._by_key.get((extra, key[:end]), {}) for end in range(1, len(key))] if key else []
        may_be_taken = [self._first(each, lambda h: not self._leases.is_lent(h.entry_id)) for each in found]
        return min((held for held in may_be_taken if held), key=lambda held: held.entry_id, default=None)

    def _find_longest(self, key: Key, extra: bytes) -> tuple[int, Held | None]:
        """How many tokens are shared, and with which entry."""
        for end in range(len(key), 0, -1):
            held = self._first(self._by_prefix.get((extra, key[:end]), {}), lambda held: True)
            if held is not None:
                return end, held
        return 0, None

    @staticmethod
    def _first(of: dict[int, Held], is_right: Callable[[Held], bool]) -> Held | None:
        return next((held for held in of.values() if held.is_up and is_right(held)), None)

    # -- what can be found, and its listeners --------------------------------------------------

    def _places(
        self, held: Held
    ) -> Iterator[tuple[dict[tuple[bytes, Key], dict[int, Held]], tuple[bytes, Key]]]:
        """Each index that has it, and where."""
        yield self._by_key, (held.extra, held.key)
        for end in range(len(held.key) + 1):
            yield self._by_prefix, (held.extra, held.key[:end])

    def _put_up(self, held: Held) -> None:
        held.is_up = True
        for index, place in self._places(held):
            index[place].setdefault(held.entry_id, held)  # one that is back keeps its place
        self._tell(self._events.stored(held.entry_id, held.key, extra=held.extra))

    def _take_down(self, held: Held, reason: RemovalReason) -> None:
        if held.is_up:
            held.is_up = False
            self._tell(self._events.removed(held.entry_id, reason))

    def _let_go(self, held: Held, reason: RemovalReason) -> None:
        """It cannot be had any more; its room is given back when it is not lent."""
        self._take_down(held, reason)
        self._held.pop(held.entry_id, None)
        for index, place in self._places(held):
            index[place].pop(held.entry_id, None)
            if not index[place]:
                del index[place]
        held.is_gone = True
        if not self._leases.is_lent(held.entry_id):
            self._used -= held.nbytes

    def _tell(self, event: StoreEvent) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                _log.exception("a listener of a lookup store failed on event %d", event.seq)

    def subscribe(self, listener: Callable[[StoreEvent], None]) -> Callable[[], None]:
        with self._changed:
            self._check_open()
            for event in self._events.snapshot():
                listener(event)
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._changed:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe

    def clear(self) -> int:
        with self._changed:
            self._check_open()
            self._num_clears += 1
            going = list(self._held.values())
            for held in going:
                self._let_go(held, RemovalReason.CLEARED)
            self._changed.notify_all()
            return len(going)

    # -- reaching ends, and ending -------------------------------------------------------------

    def attach(self, signal: Pipe, data: Pipe) -> None:
        attached = Attached(self, signal, data)
        with self._changed:
            self._check_open()
            self._attached.append(attached)
        attached.announce()

    def forget(self, attached: Attached) -> None:
        """It has ended. A call of its own that waits here looks again."""
        with self._changed:
            if attached in self._attached:
                self._attached.remove(attached)
            self._changed.notify_all()

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._leases, deadline.remaining())
        self.abort()

    def abort(self) -> None:
        with self._changed:
            self._closed = True
            self._listeners.clear()
            for held in list(self._held.values()):
                self._let_go(held, RemovalReason.CLEARED)
            self._changed.notify_all()
            attached = list(self._attached)
        for each in attached:
            each.end()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this lookup store is closed")

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # the old one may be held by a thread that is not here
        self._closed = True
        self._listeners, self._attached = [], []
