"""The entries of a store: their leases, the callers that wait for one, and the bytes that they use.

Callers see an entry in one of three states:

    free ──lease to read──► being read ──the last reader's lease ends──► free
    free ──lease to take──► handed over ──taken──► gone
                                        └─not taken──► free again, with its old id and age

An entry that is handed over is not in the index, so no other caller finds it until it is back. Its bytes
count against the budget from before it is copied in until it is gone *and* the last transfer that reads its
memory has ended.

There is one lock. Tensors are copied and sent outside it. Inserts wait for room on a condition. A caller that
wants to take an entry is a :class:`Waiter` in a queue. An entry that becomes free is *handed* to the first
waiter that it matches, so no wake-up can reach the wrong caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import attrs
from torch import Tensor

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug.transport import Deadline, Entry
from kvplug_lookup.buffer.index import TokenArray, TokenIndex


@attrs.define(eq=False, kw_only=True)
class HeldEntry:
    """One entry and its state in the store."""

    header: Entry.Header
    extra: bytes
    key_tokens: TokenArray
    """Tokens under the roi."""
    key: Tensor | None
    value: Tensor | None
    hidden: Tensor | None
    nbytes: int
    born: float
    """Time of the insert, by the monotonic clock."""
    readers: int = 0
    """Number of read leases that have not ended."""
    users: int = 0
    """Number of leases and transfers that still need its memory."""
    is_gone: bool = False

    @property
    def entry_id(self) -> int:
        return self.header.entry_id


@attrs.define(eq=False)
class Lease:
    """One caller's permission to use an entry until the lease ends."""

    entry: HeldEntry
    is_exclusive: bool
    """A lease to take the entry, not to read it."""
    is_over: bool = False


@attrs.define(eq=False, kw_only=True)
class Waiter:
    """A caller that wants to take an entry. At most one of ``lease`` and ``error`` is set."""

    key: TokenArray | None
    """``None``: any entry."""
    extra: bytes
    wake: Callable[[Waiter], None]
    """Called under the lock when ``lease`` or ``error`` is set. Must not block."""
    lease: Lease | None = None
    error: KvplugError | None = None

    def wants(self, entry: HeldEntry) -> bool:
        if entry.extra != self.extra:
            return False
        if self.key is None:
            return True
        size = min(self.key.size, entry.key_tokens.size)
        return size > 0 and bool((self.key[:size] == entry.key_tokens[:size]).all())


class Entries:
    """The entries that a store shares with the sessions of its reaching ends. Thread-safe."""

    def __init__(self, budget_bytes: int, *, evict: str, ttl_s: float | None) -> None:
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._is_idle = threading.Condition(self._lock)
        self._waiters: dict[Waiter, None] = {}  # first come, first served
        self._index = TokenIndex()
        self._entries: dict[int, HeldEntry] = {}  # in order of age; entries handed over stay in it
        self._next_id = 1
        self._num_leases = 0
        self._budget_bytes = budget_bytes
        self._bytes_lent = 0
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
                    raise TimeoutError(
                        f"no room for an entry of {nbytes} bytes: {self.bytes_used} of"
                        f" {self._budget_bytes} bytes are used by {len(self)} entries,"
                        f" {self._bytes_lent} of them lent"
                    )
                expiry = self._next_expiry(now)
                until = deadline if expiry is None else Deadline(min(deadline.at, expiry))
                self._has_room.wait(until.remaining())

    def return_bytes(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_used -= nbytes
            self._has_room.notify_all()

    def add(self, make: Callable[[int], HeldEntry]) -> int:
        """Add the entry that ``make`` returns for a new id; its bytes are reserved. Return the id.

        Raises:
            ClosedError: the store was closed meanwhile.
        """
        with self._lock:
            self._check_open()
            entry = make(self._next_id)
            self._next_id += 1
            self._entries[entry.entry_id] = entry
            self._offer(entry)
            self._has_room.notify_all()  # the new entry may be evictable
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

    def match(self, key: TokenArray, extra: bytes) -> int:
        with self._lock:
            self._check_open()
            return self._index.match(key, extra)

    def read(self, key: TokenArray, extra: bytes, min_tokens: int) -> Lease | None:
        """Lease for reading the entry that shares the longest prefix of at least ``min_tokens``."""
        with self._lock:
            self._check_open()
            found = self._index.longest_match(key, extra, min_tokens)
            return None if found is None else self._lease(self._entries[found[0]], exclusive=False)

    def take(self, waiter: Waiter) -> None:
        """Lease the oldest match for taking, now or when one is free. Then ``waiter.wake`` is called."""
        with self._lock:
            self._check_open()
            entry = self._find_oldest(waiter.key, waiter.extra)
            if entry is None:
                self._waiters[waiter] = None
            else:
                self._hand(entry, waiter)

    def withdraw(self, waiter: Waiter) -> Lease | None:
        """Stop waiting. Return the lease if the waiter has got one."""
        with self._lock:
            self._waiters.pop(waiter, None)
            return waiter.lease

    def _find_oldest(self, key: TokenArray | None, extra: bytes) -> HeldEntry | None:
        found = self._index.oldest(extra) if key is None else self._index.oldest_match(key, extra)
        return None if found is None else self._entries[found]

    def _offer(self, entry: HeldEntry) -> None:
        """Hand a free entry to the first waiter that it matches, or make it findable."""
        self._index.insert(entry.entry_id, entry.key_tokens, entry.extra)
        self._offer_to_waiters(entry)

    def _offer_to_waiters(self, entry: HeldEntry) -> None:
        for waiter in self._waiters:
            if waiter.wants(entry):
                del self._waiters[waiter]
                self._hand(entry, waiter)
                return

    def _hand(self, entry: HeldEntry, waiter: Waiter) -> None:
        waiter.lease = self._lease(entry, exclusive=True)
        waiter.wake(waiter)

    # -- leases --------------------------------------------------------------------------------

    def _lease(self, entry: HeldEntry, *, exclusive: bool) -> Lease:
        """Lease a free entry, or for a reader one that others are reading."""
        if exclusive:
            self._index.remove(entry.entry_id)
        else:
            self._index.suspend(entry.entry_id)
            entry.readers += 1
        self._num_leases += 1
        self._add_user(entry)
        return Lease(entry, exclusive)

    def end(self, lease: Lease, *, taken: bool = False) -> bool:
        """End a lease. Return ``False`` if it was over before; then ``taken`` comes too late."""
        with self._lock:
            if lease.is_over:
                return False
            lease.is_over = True
            self._num_leases -= 1
            entry = lease.entry
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
                self._offer_to_waiters(entry)
            self._remove_user(entry)
            if not self._num_leases:
                self._is_idle.notify_all()
            return True

    def begin_use(self, lease: Lease) -> bool:
        """Count a delivery that reads the entry's memory. Return ``False`` if the lease is over."""
        with self._lock:
            if not lease.is_over:
                self._add_user(lease.entry)
            return not lease.is_over

    def add_user(self, entry: HeldEntry) -> None:
        """Count one more transfer that reads the memory of an entry in use."""
        with self._lock:
            self._add_user(entry)

    def remove_user(self, entry: HeldEntry) -> None:
        """Count off a delivery or transfer that has ended."""
        with self._lock:
            self._remove_user(entry)

    def _add_user(self, entry: HeldEntry) -> None:
        if not entry.users:
            self._bytes_lent += entry.nbytes
        entry.users += 1

    def _remove_user(self, entry: HeldEntry) -> None:
        entry.users -= 1
        if not entry.users:
            self._bytes_lent -= entry.nbytes
            if entry.is_gone:
                self.bytes_used -= entry.nbytes
        self._has_room.notify_all()

    def _forget(self, entry: HeldEntry) -> None:
        del self._entries[entry.entry_id]
        entry.is_gone = True
        if not entry.users:
            self.bytes_used -= entry.nbytes

    # -- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new calls, and raise ``ClosedError`` in waiting ones. Leases stay. Idempotent."""
        with self._lock:
            self.closed = True
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                waiter.error = _closed()
                waiter.wake(waiter)
            self._has_room.notify_all()

    def wait_until_idle(self, deadline: Deadline) -> bool:
        """Return whether every lease ended before the deadline."""
        with self._lock:
            return self._is_idle.wait_for(lambda: not self._num_leases, deadline.remaining())

    def clear(self) -> None:
        """Drop all entries when the store ends. Leases stay."""
        with self._lock:
            for entry in list(self._entries.values()):
                self._index.remove(entry.entry_id)
                self._forget(entry)

    def _check_open(self) -> None:
        if self.closed:
            raise _closed()


def _closed() -> ClosedError:
    return ClosedError("this lookup store is closed")
