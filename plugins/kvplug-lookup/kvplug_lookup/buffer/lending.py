"""The shelf made safe for threads: waiting for room, and waiting for an entry.

One lock. Nothing slow happens under it: tensors are copied and sent outside. Each reason to wait has
its own way to be woken: inserts wait on a condition for room, a caller that wants to take an entry is a
:class:`Waiter` in a queue to which an entry that becomes free is *handed*, so that no wake-up can go to
the wrong one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug.transport import Deadline
from kvplug_lookup.buffer.index import TokenArray
from kvplug_lookup.buffer.shelf import Held, Loan, Shelf


@attrs.define(eq=False, kw_only=True)
class Waiter:
    """A caller that wants to take an entry. Exactly one of ``loan`` and ``error`` comes, or neither."""

    key: TokenArray | None
    """``None`` takes any."""
    extra: bytes
    holder: str
    wake: Callable[[Waiter], None]
    """Called when either has come; under the lock, so it only takes note."""
    loan: Loan | None = None
    error: KvplugError | None = None

    def wants(self, held: Held) -> bool:
        if held.extra != self.extra:
            return False
        if self.key is None:
            return True
        size = min(self.key.size, held.key_tokens.size)
        return size > 0 and bool((self.key[:size] == held.key_tokens[:size]).all())


class Lending:
    """What the store, and those who serve its reaching ends, work on. Any method, any thread."""

    def __init__(self, budget_bytes: int, *, evict: str, ttl_s: float | None) -> None:
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._waiters: dict[Waiter, None] = {}  # in the order in which they came
        self._closed = False
        self._next_id = 1
        self._shelf = Shelf(budget_bytes, evict=evict, ttl_s=ttl_s)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_entries(self) -> int:
        return len(self._shelf)

    @property
    def bytes_used(self) -> int:
        return self._shelf.bytes_used

    # -- putting in ----------------------------------------------------------------------------

    def reserve(self, nbytes: int, deadline: Deadline) -> None:
        """Wait for room. What was reserved is used by :meth:`put` or given to :meth:`return_bytes`.

        Raises:
            TimeoutError: no room in time.
            ClosedError: closed, perhaps during the wait.
        """
        with self._lock:
            while True:
                self._check_open()
                now = time.monotonic()
                if self._shelf.reserve(nbytes, now):
                    return
                if deadline.expired:
                    raise TimeoutError(
                        f"no room for an entry of {nbytes} bytes: {self._shelf.bytes_used} of"
                        f" {self._shelf.budget_bytes} bytes are used by {len(self._shelf)} entries,"
                        f" {self._shelf.bytes_lent} of them lent"
                    )
                expiry = self._shelf.next_expiry(now)
                until = deadline if expiry is None else Deadline(min(deadline.at, expiry))
                self._room.wait(until.remaining())

    def return_bytes(self, nbytes: int) -> None:
        with self._lock:
            self._shelf.return_bytes(nbytes)
            self._room.notify_all()

    def put(self, make: Callable[[int], Held]) -> int:
        """Put up the entry that ``make`` makes of its id; its bytes were reserved.

        Raises:
            ClosedError: closed meanwhile.
        """
        with self._lock:
            self._check_open()
            entry_id = self._next_id
            self._next_id += 1
            held = make(entry_id)
            self._shelf.add(held)
            self._offer(held)
            self._room.notify_all()  # the new entry is one that may have to go for another
        return entry_id

    # -- finding -------------------------------------------------------------------------------

    def match(self, key: TokenArray, extra: bytes) -> int:
        with self._lock:
            self._check_open()
            return self._shelf.match(key, extra)

    def borrow(self, key: TokenArray, extra: bytes, min_tokens: int, holder: str) -> Loan | None:
        """Lend the entry that shares the longest prefix, to be read."""
        with self._lock:
            self._check_open()
            held = self._shelf.find_longest(key, extra, min_tokens)
            return None if held is None else self._shelf.lend(held, holder, exclusive=False)

    def want(self, waiter: Waiter) -> None:
        """Lend the oldest match to be taken: now, or when one comes. ``waiter.wake`` says when."""
        with self._lock:
            self._check_open()
            held = self._shelf.find_oldest(waiter.key, waiter.extra)
            if held is None:
                self._waiters[waiter] = None
            else:
                self._hand(held, waiter)

    def withdraw(self, waiter: Waiter) -> Loan | None:
        """Stop waiting. The loan, if one had come by then."""
        with self._lock:
            self._waiters.pop(waiter, None)
            return waiter.loan

    def end(self, loan: Loan, *, taken: bool = False) -> bool:
        """A loan is over. ``False`` where it was over before; then ``taken`` comes too late."""
        with self._lock:
            is_free = self._shelf.end(loan, taken=taken)
            if is_free is None:
                return False
            if is_free:
                self._offer(loan.held)
            self._room.notify_all()
            if not self._shelf.num_loans:
                self._idle.notify_all()
            return True

    def begin_use(self, loan: Loan) -> bool:
        """A delivery begins to read the entry's memory, unless the loan is over by now."""
        with self._lock:
            if not self._shelf.is_lent(loan):
                return False
            self._shelf.use(loan.held)
            return True

    def use(self, held: Held) -> None:
        """One more transfer reads the memory of an entry that is in use."""
        with self._lock:
            self._shelf.use(held)

    def disuse(self, held: Held) -> None:
        """A delivery or transfer has ended."""
        with self._lock:
            self._shelf.disuse(held)
            self._room.notify_all()

    def _offer(self, held: Held) -> None:
        """An entry is free: the first who waits for one like it gets it."""
        for waiter in self._waiters:
            if waiter.wants(held):
                del self._waiters[waiter]
                self._hand(held, waiter)
                return

    def _hand(self, held: Held, waiter: Waiter) -> None:
        waiter.loan = self._shelf.lend(held, waiter.holder, exclusive=True)
        waiter.wake(waiter)

    # -- ending --------------------------------------------------------------------------------

    def shut(self) -> None:
        """Nothing new from here on; who waits gets ``ClosedError``. Loans go on. Idempotent."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                waiter.error = _closed()
                waiter.wake(waiter)
            self._room.notify_all()

    def wait_until_idle(self, deadline: Deadline) -> bool:
        """Whether every loan has ended by then."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._shelf.num_loans, deadline.remaining())

    def let_go(self) -> None:
        """It has ended: forget all entries."""
        with self._lock:
            self._shelf.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()


def _closed() -> ClosedError:
    return ClosedError("this lookup store is closed")
