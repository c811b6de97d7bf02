"""The entries of a store: their leases, the callers that wait for one, and the bytes that they use.

Callers see an entry in one of three states:

    free ──lease to read──► being read ──the last reader's lease ends──► free
    free ──lease to take──► handed over ──taken──► gone
                                        └─not taken──► free again, with its old id and age

An entry that is handed over is not in the index, so no other caller finds it until it is back. Its bytes
count against the budget from before it is copied in until it is gone *and* the last transfer that reads its
memory has ended.

There is one lock. Tensors are copied and sent outside it. A lease to take may wait for its entry: an entry
that becomes free is *handed* to the first waiting lease that it matches, so no wake-up can reach the wrong
caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import attrs
from torch import Tensor

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug.engine import EntryGoneError
from kvplug.transport import Deadline
from kvplug_lookup.buffer.entry import Description, Query
from kvplug_lookup.buffer.index import TokenIndex


@attrs.define(eq=False)
class HeldEntry:
    """One entry and its state in the store."""

    description: Description
    key: Tensor | None
    value: Tensor | None
    hidden: Tensor | None
    ids: bytes = attrs.field(init=False)
    """The token ids under the roi."""
    entry_id: int = attrs.field(default=0, init=False)
    """Ascending with age."""
    born: float = attrs.field(factory=time.monotonic, init=False)
    """Time of the insert, by the monotonic clock."""
    readers: int = attrs.field(default=0, init=False)
    """Number of read leases that have not ended."""
    users: int = attrs.field(default=0, init=False)
    """Number of leases and transfers that still need its memory."""
    is_gone: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.ids = self.description.ids()

    @property
    def nbytes(self) -> int:
        return self.description.nbytes


@attrs.define(eq=False)
class Lease:
    """One caller's permission to use an entry until the lease ends, or its wait for one to take."""

    query: Query
    on_ready: Callable[[Lease], None]
    """Called under the lock when it gets ``entry`` or ``error``. Must not block."""
    entry: HeldEntry | None = None
    """``None`` again when the lease is over: it keeps no memory."""
    error: KvplugError | None = None
    is_over: bool = False

    @property
    def is_exclusive(self) -> bool:
        """Whether it is to take the entry."""
        return not self.query.min_tokens


class Entries:
    """The entries that a store shares with the sessions of its reaching ends. Thread-safe."""

    def __init__(self, budget_bytes: int, *, evict: str, ttl_s: float | None) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[Lease, None] = {}  # first come, first served
        self._index = TokenIndex()
        self._entries: dict[int, HeldEntry] = {}  # in order of age; entries handed over stay in it
        self._next_id = 1
        self._num_leases = 0
        self._budget_bytes = budget_bytes
        self._evict = evict
        self._ttl_s = ttl_s
        self.bytes_used = 0
        """Bytes reserved, held, or still being sent."""
        self.closed = False

    def __len__(self) -> int:
        return len(self._entries)

    # -- putting in ----------------------------------------------------------------------------

    def reserve(self, nbytes: int, deadline: Deadline) -> None:
        """Wait for room. Then call :meth:`add`, or give the bytes back with :meth:`return_bytes`.

        Raises:
            TimeoutError: there was no room in time.
            ClosedError: the store is closed, perhaps during the wait.
        """
        with self._lock:
            while True:
                self._check_open()
                now = time.monotonic()
                if self._make_room(nbytes, now):
                    self.bytes_used += nbytes
                    return
                if deadline.expired:
                    lent = self.bytes_used - sum(entry.nbytes for entry in self._unused())
                    raise TimeoutError(
                        f"no room for an entry of {nbytes} bytes: {self.bytes_used} of"
                        f" {self._budget_bytes} bytes are used by {len(self)} entries, {lent} of them lent"
                    )
                expiry = self._next_expiry(now)
                until = deadline if expiry is None else Deadline(min(deadline.at, expiry))
                self._changed.wait(until.remaining())

    def return_bytes(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_used -= nbytes
            self._changed.notify_all()

    def add(self, entry: HeldEntry) -> int:
        """Add an entry whose bytes are reserved. Return its id.

        Raises:
            ClosedError: the store was closed meanwhile.
        """
        with self._lock:
            self._check_open()
            entry.entry_id = self._next_id
            self._next_id += 1
            self._entries[entry.entry_id] = entry
            self._offer(entry)
            self._changed.notify_all()  # the new entry may be evictable
        return entry.entry_id

    def _make_room(self, nbytes: int, now: float) -> bool:
        """Evict old entries as the options permit. Return whether there is room for ``nbytes``."""
        missing = self.bytes_used + nbytes - self._budget_bytes
        going = []
        for entry in self._unused() if missing > 0 else ():
            is_old = self._ttl_s is not None and entry.born + self._ttl_s <= now
            if not is_old and self._evict != "oldest":
                break  # the others are younger
            going.append(entry)
            missing -= entry.nbytes
            if missing <= 0:
                break
        if missing > 0:
            return False
        for entry in going:
            self._index.remove(entry.entry_id)
            self._forget(entry)
        return True

    def _next_expiry(self, now: float) -> float | None:
        """When the next unused entry will be older than ``ttl_s``."""
        if self._ttl_s is None:
            return None
        ends = (entry.born + self._ttl_s for entry in self._unused())
        return next((end for end in ends if end > now), None)

    def _unused(self) -> Iterable[HeldEntry]:
        return (entry for entry in self._entries.values() if not entry.users)

    # -- finding -------------------------------------------------------------------------------

    def match(self, query: Query) -> int:
        with self._lock:
            self._check_open()
            return self._index.match(query.ids or b"", query.extra)

    def find(self, query: Query, on_ready: Callable[[Lease], None]) -> Lease:
        """Return a lease that has, or will get, an entry or an error. One to take may wait for its entry.

        End the lease in any case. The error is ``EntryGoneError`` if no entry shares enough tokens with a
        query to read, or ``ClosedError``.
        """
        lease = Lease(query, on_ready)
        with self._lock:
            find = self._find_oldest if lease.is_exclusive else self._find_longest
            if self.closed:
                self._refuse(lease, _closed())
            elif (entry := find(query)) is not None:
                self._hand(entry, lease)
            elif lease.is_exclusive:
                self._waiting[lease] = None
            else:
                self._refuse(lease, EntryGoneError(f"{query}: no entry shares enough tokens"))
        return lease

    def _find_oldest(self, query: Query) -> HeldEntry | None:
        found = self._index.oldest_match(query.ids, query.extra)
        return None if found is None else self._entries[found]

    def _find_longest(self, query: Query) -> HeldEntry | None:
        found = self._index.longest_match(query.ids or b"", query.extra, query.min_tokens)
        return None if found is None else self._entries[found]

    def _offer(self, entry: HeldEntry) -> None:
        """Make a free entry findable, and hand it to the first waiting lease that it matches."""
        self._index.insert(entry.entry_id, entry.ids, entry.description.extra)
        self._offer_to_waiting(entry)

    def _offer_to_waiting(self, entry: HeldEntry) -> None:
        for lease in self._waiting:
            if lease.query.is_met_by(entry.ids, entry.description.extra):
                del self._waiting[lease]
                self._hand(entry, lease)
                return

    def _hand(self, entry: HeldEntry, lease: Lease) -> None:
        if lease.is_exclusive:
            self._index.remove(entry.entry_id)
        else:
            self._index.suspend(entry.entry_id)
            entry.readers += 1
        self._num_leases += 1
        entry.users += 1
        lease.entry = entry
        lease.on_ready(lease)

    def _refuse(self, lease: Lease, error: KvplugError) -> None:
        lease.error = error
        lease.on_ready(lease)

    # -- leases --------------------------------------------------------------------------------

    def end(self, lease: Lease, *, taken: bool = False) -> bool:
        """End a lease, also one that waits. Return whether it had its entry until now: else ``taken`` comes
        too late."""
        with self._lock:
            self._waiting.pop(lease, None)
            entry, lease.entry, lease.is_over = lease.entry, None, True
            if entry is None:
                return False
            self._num_leases -= 1
            if not lease.is_exclusive:
                entry.readers -= 1
            if entry.is_gone:
                pass  # the store has ended
            elif lease.is_exclusive and taken:
                self._forget(entry)
            elif lease.is_exclusive:
                self._offer(entry)
            elif not entry.readers:
                self._index.resume(entry.entry_id)
                self._offer_to_waiting(entry)
            self._remove_user(entry)
            return True

    def add_user(self, lease: Lease) -> bool:
        """Count one more transfer that reads the entry's memory. Return ``False`` if the lease is over."""
        with self._lock:
            if lease.entry is None:
                return False
            lease.entry.users += 1
            return True

    def remove_user(self, entry: HeldEntry) -> None:
        """Count off a transfer that has ended."""
        with self._lock:
            self._remove_user(entry)

    def _remove_user(self, entry: HeldEntry) -> None:
        entry.users -= 1
        if entry.is_gone and not entry.users:
            self.bytes_used -= entry.nbytes
        self._changed.notify_all()

    def _forget(self, entry: HeldEntry) -> None:
        del self._entries[entry.entry_id]
        entry.is_gone = True
        if not entry.users:
            self.bytes_used -= entry.nbytes

    # -- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new calls, and end the wait of leases that wait. The others stay. Idempotent."""
        with self._lock:
            self.closed = True
            waiting, self._waiting = self._waiting, {}
            for lease in waiting:
                self._refuse(lease, _closed())
            self._changed.notify_all()

    def wait_until_idle(self, deadline: Deadline) -> None:
        """Wait until every lease has ended, or the deadline."""
        with self._lock:
            self._changed.wait_for(lambda: not self._num_leases, deadline.remaining())

    def clear(self) -> None:
        """Drop all entries when the store ends. Leases stay."""
        with self._lock:
            self._index = TokenIndex()
            for entry in list(self._entries.values()):
                self._forget(entry)

    def _check_open(self) -> None:
        if self.closed:
            raise _closed()


def _closed() -> ClosedError:
    return ClosedError("this lookup store is closed")
