"""What a store holds, what of it is lent, how many bytes that is: rules without locks or threads.

An entry is, as far as others can see, in one of three states:

    free ──lend(shared)──► being read ──last reader ends──► free
    free ──lend(exclusive)──► handed over ──taken──► gone
                                          └─not taken──► free again, with its old id and age

One that is handed over is in no index: to everybody else it is gone until it is back. Its bytes count
against the budget from before it was copied in until it is gone *and* the last transfer that reads its
memory has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from torch import Tensor

from kvplug.transport import Entry
from kvplug_lookup.buffer.index import TokenArray, TokenIndex
from kvplug_lookup.buffer.leases import Lease, Leases


@attrs.define(eq=False, kw_only=True)
class Held:
    """One entry and what the store knows about it."""

    header: Entry.Header
    extra: bytes
    key_tokens: TokenArray
    """Those under the roi."""
    key: Tensor | None
    value: Tensor | None
    hidden: Tensor | None
    nbytes: int
    born: float
    """Of the monotonic clock."""
    users: int = 0
    """Loans and transfers that still need its memory."""
    is_gone: bool = False

    @property
    def entry_id(self) -> int:
        return self.header.entry_id


@attrs.define(eq=False)
class Loan:
    """An entry that is lent to one caller, to read or to take."""

    held: Held
    lease: Lease

    @property
    def is_exclusive(self) -> bool:
        return self.lease.exclusive


class Shelf:
    """The entries of one store."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        evict: str,
        ttl_s: float | None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_used = 0
        """Reserved, held, or still being sent."""
        self.bytes_lent = 0
        self._evict = evict
        self._ttl_s = ttl_s
        self._leases = Leases()
        self._index = TokenIndex()
        self._entries: dict[int, Held] = {}  # in order of age; entries handed over stay in it

    # -- room ----------------------------------------------------------------------------------

    def reserve(self, nbytes: int, now: float) -> bool:
        """Set ``nbytes`` aside for an entry, giving up old ones where the options say so."""
        missing = self.bytes_used + nbytes - self.budget_bytes
        if missing > 0:
            going = self._expendable(missing, now)
            if going is None:
                return False
            for held in going:
                self._index.remove(held.entry_id)
                self._forget(held)
        self.bytes_used += nbytes
        return True

    def return_bytes(self, nbytes: int) -> None:
        """What was reserved is not needed after all."""
        self.bytes_used -= nbytes

    def next_expiry(self, now: float) -> float | None:
        """When the next entry that is not being read will become old enough to go."""
        if self._ttl_s is None:
            return None
        ends = (held.born + self._ttl_s for held in self._unused())
        return next((end for end in ends if end > now), None)

    def _expendable(self, nbytes: int, now: float) -> list[Held] | None:
        """Which entries have to go for ``nbytes``; ``None`` if all that may go would not do."""
        going = []
        for held in self._unused():
            is_old = self._ttl_s is not None and held.born + self._ttl_s <= now
            if not is_old and self._evict != "oldest":
                break  # the others are younger still
            going.append(held)
            nbytes -= held.nbytes
            if nbytes <= 0:
                return going
        return None

    def _unused(self) -> Iterable[Held]:
        return (held for held in self._entries.values() if not held.users)

    # -- entries -------------------------------------------------------------------------------

    def add(self, held: Held) -> None:
        """Put an entry up whose bytes were reserved."""
        self._entries[held.entry_id] = held
        self._put_up(held)

    def match(self, key: TokenArray, extra: bytes) -> int:
        return self._index.match(key, extra)

    def find_oldest(self, key: TokenArray | None, extra: bytes) -> Held | None:
        """The oldest free entry that matches; any entry where ``key`` is ``None``."""
        found = self._index.oldest(extra) if key is None else self._index.oldest_match(key, extra)
        return None if found is None else self._entries[found]

    def find_longest(self, key: TokenArray, extra: bytes, min_tokens: int) -> Held | None:
        """An entry that shares the longest prefix, at least ``min_tokens``; perhaps one being read."""
        found = self._index.longest_match(key, extra, min_tokens)
        return None if found is None else self._entries[found[0]]

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all entries, at the end of the store. Loans go on."""
        for held in list(self._entries.values()):
            self._index.remove(held.entry_id)
            self._forget(held)

    # -- lending -------------------------------------------------------------------------------

    @property
    def num_loans(self) -> int:
        return len(self._leases)

    def lend(self, held: Held, holder: str, *, exclusive: bool) -> Loan:
        """To read a free entry or one being read, or to take a free one."""
        if not held.users:
            self.bytes_lent += held.nbytes
        lease = self._leases.take(held.entry_id, holder, exclusive=exclusive)
        if exclusive:
            self._index.remove(held.entry_id)
        else:
            self._index.suspend(held.entry_id)
        self.use(held)
        return Loan(held, lease)

    def end(self, loan: Loan, *, taken: bool) -> bool | None:
        """The loan is over; whether the entry is free (again). ``None``: it was over before."""
        if not self._leases.release(loan.lease):
            return None
        held = loan.held
        is_free = False
        if held.is_gone:
            pass  # the store has ended
        elif loan.is_exclusive and taken:
            self._forget(held)
        elif loan.is_exclusive:
            self._put_up(held)
            is_free = True
        elif not self._leases.holders(held.entry_id):
            self._index.resume(held.entry_id)
            is_free = True
        self.disuse(held)
        return is_free

    def is_lent(self, loan: Loan) -> bool:
        """Whether the loan still stands."""
        return loan.lease in self._leases

    def use(self, held: Held) -> None:
        """One more needs the memory."""
        held.users += 1

    def disuse(self, held: Held) -> None:
        """One less needs the memory."""
        held.users -= 1
        if not held.users:
            self.bytes_lent -= held.nbytes
            if held.is_gone:
                self.bytes_used -= held.nbytes

    def _put_up(self, held: Held) -> None:
        self._index.insert(held.entry_id, held.key_tokens, held.extra)

    def _forget(self, held: Held) -> None:
        del self._entries[held.entry_id]
        held.is_gone = True
        if not held.users:
            self.bytes_used -= held.nbytes
