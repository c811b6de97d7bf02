"""The entries of a lookup store "memory": its index, capacity and leases.

There is one lock with one condition. A call that waits for capacity, for an entry or for the end of a lease
checks again after each change. The index is a dict of all keys and all their prefixes: simple code that needs
much memory for long prompts.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from kvplug import CapacityError, ClosedError, TimeoutError
from kvplug.engine import EntryGoneError
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, Entry, EntryHeader, Lease, Leases, Timeout
from kvplug_testing.memory.entries import Key, checked_tokens, copy_of, extra_bytes, nbytes_of, num_layers_of

if TYPE_CHECKING:
    from torch import Tensor


@attrs.define(eq=False, kw_only=True)
class StoredEntry:
    """An entry, and the store's record of it."""

    entry: Entry
    extra: bytes
    key: Key
    nbytes: int
    is_published: bool = False
    """Whether it can be found. An entry that is leased to be taken cannot."""
    is_removed: bool = False
    """Its bytes are free when its last lease ends."""

    @property
    def entry_id(self) -> int:
        return self.entry.header.entry_id


@attrs.frozen(eq=False)
class LeasedEntry:
    """An entry that one caller has leased: to read it, or (exclusively) to take it."""

    stored: StoredEntry
    lease: Lease


class StoreCore:
    """The entries of one store."""

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._changed = threading.Condition()  # guards all that follows
        self._entries: dict[int, StoredEntry] = {}  # oldest first, leased ones included
        self._index: dict[tuple[str, bytes, Key], dict[int, StoredEntry]] = defaultdict(dict)
        self._leases = Leases()
        self._used_bytes = 0
        self._next_id = 1
        self._closed = False

    # -- insert --------------------------------------------------------------------------------

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
        deadline = Deadline.after(timeout, self._timeout_s)
        tokens, mask = checked_tokens(input_tokens, roi)
        if not mask.any():
            raise ValueError("no token of the entry is under its roi: it could never be found")
        num_layers = num_layers_of(len(tokens), key, value)
        nbytes = nbytes_of(len(tokens), key, value, hidden)
        extra = extra_bytes(extra)
        if nbytes > self._max_bytes:
            raise CapacityError(f"an entry of {nbytes} bytes does not fit into a buffer of {self._max_bytes}")
        with self._changed:
            self._wait_for_capacity(nbytes, deadline)
            header = EntryHeader(
                entry_id=self._next_id,
                tokens=tokens,
                roi=mask,
                num_layers=num_layers,
                metadata=metadata or {},
            )
            given = Entry(header=header, tokens=tokens, roi=mask, key=key, value=value, hidden=hidden)
            counted = tuple(tokens[mask].tolist())
            stored = StoredEntry(entry=copy_of(given), extra=extra, key=counted, nbytes=nbytes)
            self._next_id += 1
            self._used_bytes += nbytes
            self._entries[stored.entry_id] = stored
            self._publish(stored)
            self._changed.notify_all()
        return stored.entry_id

    def _wait_for_capacity(self, nbytes: int, deadline: Deadline) -> None:
        while True:
            self._check_open()
            if self._has_room(nbytes):
                return
            if deadline.expired:
                used = f"{self._used_bytes} of {self._max_bytes} are used"
                raise TimeoutError(f"no capacity for {nbytes} bytes in time: {used}")
            self._changed.wait(deadline.remaining())

    def _has_room(self, nbytes: int) -> bool:
        return self._used_bytes + nbytes <= self._max_bytes

    # -- leases, for callers at both ends ------------------------------------------------------

    def count_shared(self, key: Key, extra: bytes) -> int:
        """The length of the longest prefix of ``key`` that an entry shares."""
        with self._changed:
            self._check_open()
            return self._find_longest(key, extra)[0]

    def lease_oldest(
        self, key: Key | None, extra: bytes, deadline: Deadline, is_cancelled: Callable[[], bool]
    ) -> LeasedEntry:
        """Lease the oldest match (any entry if ``key`` is ``None``) to be taken; waits until there is one.

        Raises:
            TimeoutError: no entry arrived in time, or ``is_cancelled()``, which is called after each change.
            ClosedError: the store is closed.
        """
        with self._changed:
            while True:
                self._check_open()
                if is_cancelled():
                    raise TimeoutError("the call was cancelled")
                stored = self._find_oldest(key, extra)
                if stored is not None:
                    return self._lease(stored, exclusive=True)
                if deadline.expired:
                    raise TimeoutError("no entry that matches came in time")
                self._changed.wait(deadline.remaining())

    def lease_longest(self, key: Key, extra: bytes, min_tokens: int) -> LeasedEntry:
        """Lease the entry that shares the longest prefix, to be read.

        Raises:
            EntryGoneError: no entry shares ``min_tokens`` tokens.
        """
        with self._changed:
            self._check_open()
            shared, stored = self._find_longest(key, extra)
            if stored is None or shared < min_tokens:
                raise EntryGoneError(f"no entry shares {max(1, min_tokens)} tokens with the query")
            return self._lease(stored, exclusive=False)

    def _lease(self, stored: StoredEntry, *, exclusive: bool) -> LeasedEntry:
        lease = self._leases.take(stored.entry_id, "a caller", exclusive=exclusive)
        if exclusive:
            stored.is_published = False
        return LeasedEntry(stored, lease)

    def release(self, leased: LeasedEntry, *, is_received: bool) -> None:
        """End a lease. An entry leased to be taken is removed if it ``is_received``, else it is available
        again.
        """
        stored = leased.stored
        with self._changed:
            self._leases.release(leased.lease)
            if leased.lease.exclusive and is_received:
                self._remove(stored)
            elif leased.lease.exclusive and not stored.is_removed:
                self._publish(stored)
            elif stored.is_removed and not self._leases.is_lent(stored.entry_id):
                self._used_bytes -= stored.nbytes
            self._changed.notify_all()

    # -- index ---------------------------------------------------------------------------------

    def _find_oldest(self, key: Key | None, extra: bytes) -> StoredEntry | None:
        """The oldest entry that matches: it begins with the key, or is a prefix of it. Without a key, any
        entry.
        """
        if key == ():
            return None
        found = [self._index.get(("prefix", extra, key or ()), {})]
        found += [self._index.get(("key", extra, key[:end]), {}) for end in range(1, len(key))] if key else []
        free = [self._first(each, lambda it: not self._leases.is_lent(it.entry_id)) for each in found]
        return min((stored for stored in free if stored), key=lambda it: it.entry_id, default=None)

    def _find_longest(self, key: Key, extra: bytes) -> tuple[int, StoredEntry | None]:
        """The number of shared tokens, and the entry that shares them."""
        for end in range(len(key), 0, -1):
            stored = self._first(self._index.get(("prefix", extra, key[:end]), {}), lambda it: True)
            if stored is not None:
                return end, stored
        return 0, None

    @staticmethod
    def _first(of: dict[int, StoredEntry], fits: Callable[[StoredEntry], bool]) -> StoredEntry | None:
        return next((stored for stored in of.values() if stored.is_published and fits(stored)), None)

    @staticmethod
    def _index_keys(stored: StoredEntry) -> Iterator[tuple[str, bytes, Key]]:
        yield "key", stored.extra, stored.key
        for end in range(len(stored.key) + 1):
            yield "prefix", stored.extra, stored.key[:end]

    def _publish(self, stored: StoredEntry) -> None:
        stored.is_published = True
        for key in self._index_keys(stored):
            self._index[key].setdefault(stored.entry_id, stored)  # a returned entry keeps its position

    def _remove(self, stored: StoredEntry) -> None:
        """Make it unavailable. Its bytes are free when it is not leased."""
        stored.is_published = False
        self._entries.pop(stored.entry_id, None)
        for key in self._index_keys(stored):
            self._index[key].pop(stored.entry_id, None)
            if not self._index[key]:
                del self._index[key]
        stored.is_removed = True
        if not self._leases.is_lent(stored.entry_id):
            self._used_bytes -= stored.nbytes

    # -- the end -------------------------------------------------------------------------------

    def _remove_all(self) -> None:
        for stored in list(self._entries.values()):
            self._remove(stored)
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this lookup store is closed")
