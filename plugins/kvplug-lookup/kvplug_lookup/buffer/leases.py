"""The rules of leases: which holder may use an entry, for how long, and what is forbidden meanwhile.

Pure: no lock, no thread, and the clock is an argument. The owner of the entries calls this under its own
lock. Entries and holders are names (an id; "worker 3 at pid 71"); nothing is looked up.

- A *shared* lease is compatible with other shared ones; an *exclusive* one with none.
- A leased entry may not be evicted.
- A lease ends by :meth:`Leases.release` (the holder is done), :meth:`Leases.revoke` (the holder is dead)
  or :meth:`Leases.expire` (its time is over). Each ends a lease only once and returns whether it did, so that
  of two that race only the first succeeds.
- Time alone ends nothing: a lease that is overdue stays in force until the owner calls
  :meth:`Leases.expire`, which returns the leases whose transfers must be fenced first.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable

import attrs

from kvplug.engine import LentError


@attrs.frozen(kw_only=True)
class Lease:
    """A permission to use one entry. A value: it ends by a call of :class:`Leases`, not by being dropped."""

    lease_id: int
    """Unique among the leases of one :class:`Leases`, never reused."""
    entry_id: int
    """The entry that it permits to use."""
    holder: str
    """Who uses the entry, for messages: "worker 3 at pid 71"."""
    exclusive: bool
    """Whether no other lease on the entry may be in force with it."""
    expires_at: float
    """On the owner's clock; ``math.inf`` for a lease that does not expire."""


class Leases:
    """All leases on the entries of one owner.

    >>> leases = Leases()
    >>> lease = leases.take(17, "worker 3", exclusive=True)
    >>> leases.may_take(17, exclusive=False)
    False
    >>> leases.release(lease), leases.release(lease)
    (True, False)

    Args:
        clock: seconds, never going back; only differences matter.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_id = 1
        self._leases: dict[int, Lease] = {}
        self._by_entry: dict[int, set[int]] = {}
        self._by_holder: dict[str, set[int]] = {}
        self._due: list[tuple[float, int]] = []  # a heap; ids no longer in _leases are stale

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: object) -> bool:
        return isinstance(lease, Lease) and self._leases.get(lease.lease_id) == lease

    # -- taking --------------------------------------------------------------------------------

    def may_take(self, entry_id: int, *, exclusive: bool) -> bool:
        """Whether :meth:`take` would succeed now."""
        held = self._by_entry.get(entry_id)
        if not held:
            return True
        return not exclusive and not any(self._leases[lease_id].exclusive for lease_id in held)

    def take(self, entry_id: int, holder: str, *, exclusive: bool, duration_s: float | None = None) -> Lease:
        """A lease on the entry, from now on. One holder may have several, also on one entry.

        Args:
            duration_s: seconds until it is overdue; ``None`` for ever.

        Raises:
            LentError: a lease is in force that excludes this one; says who holds it.
            ValueError: the duration is not a positive number.
        """
        if duration_s is not None and not duration_s > 0:
            raise ValueError(f"a lease lasts more than 0 seconds, or None for ever; got {duration_s!r}")
        if not self.may_take(entry_id, exclusive=exclusive):
            wanted = "taken" if exclusive else "read"
            who = ", ".join(self.holders(entry_id))
            raise LentError(f"entry {entry_id} cannot be {wanted}: {who} has it")
        lease = Lease(
            lease_id=self._next_id,
            entry_id=entry_id,
            holder=holder,
            exclusive=exclusive,
            expires_at=math.inf if duration_s is None else self._clock() + duration_s,
        )
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        self._by_entry.setdefault(entry_id, set()).add(lease.lease_id)
        self._by_holder.setdefault(holder, set()).add(lease.lease_id)
        if duration_s is not None:
            heapq.heappush(self._due, (lease.expires_at, lease.lease_id))
        return lease

    # -- ending --------------------------------------------------------------------------------

    def release(self, lease: Lease) -> bool:
        """The holder is done. False: the lease had ended before, so the holder's last reads are not valid."""
        if lease not in self:
            return False
        self._end(lease)
        return True

    def revoke(self, holder: str) -> tuple[Lease, ...]:
        """The holder is gone: end all its leases, and return them, oldest first."""
        ended = tuple(self._leases[lease_id] for lease_id in sorted(self._by_holder.get(holder, ())))
        for lease in ended:
            self._end(lease)
        return ended

    def expire(self) -> tuple[Lease, ...]:
        """End every lease whose time is over, and return them, the longest overdue first."""
        now = self._clock()
        ended = []
        while self._due and self._due[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._due)[1])
            if lease is not None:
                self._end(lease)
                ended.append(lease)
        return tuple(ended)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        of_entry = self._by_entry[lease.entry_id]
        of_entry.discard(lease.lease_id)
        if not of_entry:
            del self._by_entry[lease.entry_id]
        of_holder = self._by_holder[lease.holder]
        of_holder.discard(lease.lease_id)
        if not of_holder:
            del self._by_holder[lease.holder]
        # a lease that ends early leaves its id in the heap: drop those before they outnumber the living
        if len(self._due) > 2 * len(self._leases) + 16:
            self._due = [due for due in self._due if due[1] in self._leases]
            heapq.heapify(self._due)

    # -- asking --------------------------------------------------------------------------------

    def is_lent(self, entry_id: int) -> bool:
        """Whether any holder has a lease on it. Such an entry must not be evicted or overwritten."""
        return entry_id in self._by_entry

    def holders(self, entry_id: int) -> tuple[str, ...]:
        """The holders of the entry, each once, in the order in which they took it."""
        held = sorted(self._by_entry.get(entry_id, ()))
        return tuple(dict.fromkeys(self._leases[lease_id].holder for lease_id in held))

    def next_expiry(self) -> float | None:
        """The moment, on the clock, at which :meth:`expire` will next have something to do."""
        while self._due and self._due[0][1] not in self._leases:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None
