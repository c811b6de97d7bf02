"""The lookup buffer "memory": entries in this process, under one lock and one condition.

Whoever waits, for room, for an entry or for a reader to end, waits for "something has changed" and then looks
again. An entry is lent while it is read or handed over; ``kvplug.transport.lease`` says who has it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import CapacityError, ClosedError, EntryGoneError, TimeoutError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.fork import close_after_fork
from kvplug.testing.memory.entries import copied, hand_over, header_of, nbytes_of, num_layers_of
from kvplug.testing.memory.lookup_reach import MemoryReachingEnd
from kvplug.testing.memory.lookup_session import Session
from kvplug.testing.memory.tokens import Key, TokenTree, extra_bytes, key_under, roi_mask, token_ids
from kvplug.transport.context import LookupContext
from kvplug.transport.events import EventLog, RemovalReason, StoreEvent
from kvplug.transport.lease import Lease, Leases
from kvplug.transport.lookup import Entry, EntrySink, LookupBuffer, LookupEndpoint, LookupStore
from kvplug.transport.pipe import Pipe

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
    """Whether it is in the tree, where it can be found. One that is being handed over is not."""
    is_gone: bool = False
    """Evicted or cleared: it goes when the last who has it is done."""

    @property
    def entry_id(self) -> int:
        return self.entry.header.entry_id


@attrs.frozen(eq=False)
class Loan:
    """An entry lent to one caller: to be read, or (exclusively) to be taken."""

    held: Held
    lease: Lease


class MemoryStore(LookupStore):
    """The end that holds the entries. As a cache, a full one drops the oldest that nobody is reading."""

    def __init__(self, context: LookupContext, *, as_cache: bool) -> None:
        self._budget = context.buffer_size
        self._timeout_s = context.timeout_s
        self._as_cache = as_cache
        self._changed = threading.Condition()  # guards all that follows
        self._held: dict[int, Held] = {}  # oldest first; those lent are in it
        self._trees: dict[bytes, TokenTree] = {}
        self._leases = Leases()
        self._used = 0  # bytes of the budget
        self._next_id = 1
        self._num_clears = 0
        self._events = EventLog()
        self._listeners: list[Callable[[StoreEvent], None]] = []
        self._sessions: list[Session] = []
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
        deadline = Deadline.after(timeout, self._timeout_s)
        ids = token_ids(input_tokens)
        mask = roi_mask(roi, len(ids))
        if not any(mask):
            raise ValueError("no token of the entry is under its roi: it could never be found")
        num_layers = num_layers_of(len(ids), key, value)
        nbytes = nbytes_of(len(ids), key, value, hidden)
        extra = extra_bytes(extra)
        if nbytes > self._budget:
            raise CapacityError(f"an entry of {nbytes} bytes does not fit into a buffer of {self._budget}")
        with self._changed:
            self._wait_for_room(nbytes, num_clears, deadline)
            header = header_of(self._next_id, ids, mask, num_layers, metadata or {})
            entry = Entry(
                header=header,
                tokens=header.tokens,
                roi=header.roi,
                key=copied(key),
                value=copied(value),
                hidden=copied(hidden),
            )
            held = Held(entry=entry, extra=extra, key=key_under(ids, mask), nbytes=nbytes)
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
                    f"no room for {nbytes} bytes in time: {self._used} of {self._budget} are used by"
                    f" {len(self._held)} entries"
                )
            self._changed.wait(deadline.remaining())

    def _make_room(self, nbytes: int) -> bool:
        """Whether there is room. A cache makes some if it can; none goes where that would not do."""
        missing = self._used + nbytes - self._budget
        going = []
        if self._as_cache:
            for held in self._held.values():
                if missing > 0 and self._may_be_evicted(held):
                    going.append(held)
                    missing -= held.nbytes
        if missing > 0:
            return False
        for held in going:
            self._let_go(held, RemovalReason.EVICTED)
        return True

    def _may_be_evicted(self, held: Held) -> bool:
        return not self._leases.is_lent(held.entry_id)

    # -- finding -------------------------------------------------------------------------------

    def match(self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
        return self.count_shared(key_under(input_tokens, roi), extra_bytes(extra))

    def drop_select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = Deadline.after(timeout, self._timeout_s)
        key = None if input_tokens is None else key_under(input_tokens, roi)
        loan = self.lend_oldest(key, extra_bytes(extra), "a thread of this process", deadline)
        self.end(loan, taken=True)
        return loan.held.entry

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
        deadline = Deadline.after(timeout, self._timeout_s)
        key = key_under(input_tokens, roi)
        loan = self.lend_longest(key, extra_bytes(extra), min_tokens, "a thread of this process")
        try:
            return hand_over(loan.held.entry, sink, deadline)
        finally:
            self.end(loan, taken=False)

    # -- for both ends: a caller here, or one that a session serves ------------------------------

    def count_shared(self, key: Key, extra: bytes) -> int:
        with self._changed:
            self._check_open()
            return self._find_longest(key, extra)[0]

    def lend_oldest(
        self,
        key: Key | None,
        extra: bytes,
        holder: str,
        deadline: Deadline,
        given_up: Callable[[], bool] = lambda: False,
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
                    return self._lend(held, holder, exclusive=True)
                if deadline.expired:
                    raise TimeoutError("no entry that matches came in time")
                self._changed.wait(deadline.remaining())

    def lend_longest(self, key: Key, extra: bytes, min_tokens: int, holder: str) -> Loan:
        """Lend the entry that shares the longest prefix, to be read.

        Raises:
            EntryGoneError: nothing shares ``min_tokens`` tokens.
        """
        with self._changed:
            self._check_open()
            shared, held = self._find_longest(key, extra)
            if held is None or shared < max(1, min_tokens):
                raise EntryGoneError(
                    f"nothing that is held shares {max(1, min_tokens)} tokens with the query"
                )
            return self._lend(held, holder, exclusive=False)

    def end(self, loan: Loan, *, taken: bool) -> None:
        """Whoever had it is done: with it (``taken``), or it goes back."""
        held = loan.held
        with self._changed:
            self._leases.release(loan.lease)
            if loan.lease.exclusive and taken:
                self._let_go(held, RemovalReason.TAKEN)
            elif loan.lease.exclusive and not held.is_gone:
                self._put_up(held)
            elif not self._leases.is_lent(held.entry_id):
                if held.is_gone:
                    self._used -= held.nbytes
                else:
                    self._trees[held.extra].free(held.entry_id, held.key)
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until it is true; it is looked at whenever something changes."""
        with self._changed:
            self._changed.wait_for(condition)

    def wake(self) -> None:
        """Something that somebody may be waiting for has changed."""
        with self._changed:
            self._changed.notify_all()

    def _find_oldest(self, key: Key | None, extra: bytes) -> Held | None:
        tree = self._trees.get(extra)
        if tree is None:
            return None
        found = tree.oldest() if key is None else tree.oldest_match(key)
        return None if found is None else self._held[found]

    def _find_longest(self, key: Key, extra: bytes) -> tuple[int, Held | None]:
        """How many tokens are shared, and with whom."""
        tree = self._trees.get(extra)
        shared, found = (0, None) if tree is None else tree.longest(key)
        return shared, None if found is None else self._held[found]

    def _lend(self, held: Held, holder: str, *, exclusive: bool) -> Loan:
        lease = self._leases.take(held.entry_id, holder, exclusive=exclusive)
        if exclusive:
            self._take_down(held, RemovalReason.TAKEN)
        else:
            self._trees[held.extra].keep(held.entry_id, held.key)
        return Loan(held, lease)

    # -- what can be found, and who hears of it ------------------------------------------------

    def _put_up(self, held: Held) -> None:
        held.is_up = True
        self._trees.setdefault(held.extra, TokenTree()).add(held.entry_id, held.key)
        self._tell(self._events.stored(held.entry_id, held.key, extra=held.extra))

    def _take_down(self, held: Held, reason: RemovalReason) -> None:
        if held.is_up:
            held.is_up = False
            self._trees[held.extra].remove(held.entry_id, held.key)
            self._tell(self._events.removed(held.entry_id, reason))

    def _let_go(self, held: Held, reason: RemovalReason) -> None:
        """It is nobody's any more; its room is given back when nobody has it."""
        self._take_down(held, reason)
        self._held.pop(held.entry_id, None)
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

    # -- reaching ends -------------------------------------------------------------------------

    def attach(self, signal: Pipe, data: Pipe) -> None:
        with self._changed:
            self._check_open()
            session = self._session(signal, data)
            self._sessions.append(session)
        session.start()

    def _session(self, signal: Pipe, data: Pipe) -> Session:
        return Session(self, signal, data)

    def forget(self, session: Session) -> None:
        """For a session that has ended."""
        with self._changed:
            if session in self._sessions:
                self._sessions.remove(session)
            self._changed.notify_all()

    # -- ending --------------------------------------------------------------------------------

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._leases, deadline.remaining())
            sessions = list(self._sessions)
        for session in sessions:
            session.close(deadline)
        self.abort()

    def abort(self) -> None:
        with self._changed:
            self._closed = True
            self._listeners.clear()
            for held in list(self._held.values()):
                self._let_go(held, RemovalReason.CLEARED)
            sessions = list(self._sessions)
            self._changed.notify_all()
        for session in sessions:
            session.end()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this lookup store is closed")

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # the old one may be held by a thread that is not here
        self._closed = True
        self._listeners, self._sessions = [], []
