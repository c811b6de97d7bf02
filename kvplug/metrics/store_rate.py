"""Whether a store gives or takes pages far more slowly than it did before in this process.

A store claims no rate, and its caches, its load and the number of requests under way change its rate by some
times. So its history is the best that it has kept up, and only a twentieth of that is slow. Two things make a
store look faster than it is, and count for a bounded rate: a put of pages that are held moves nothing,
and a disk's pages come out of the page cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

import attrs

from kvplug.metrics.path_rate import LEAST_BYTES, Finding, PathRate, SharedTime
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.memory import PageBuffers
from kvplug.transport.store.results import MissReason, Presence, PutReason
from kvplug.transport.store.store import PageRequest, Store
from kvplug.transport.store.wrapper import StoreWrapper

FACTOR: Final = 20
"""A store is slow that needs this many times as long as it did before."""
REFUSED_S: Final = 60.0
"""A store that is refused is tried again after so long."""

_MOST_PUT_GB_PER_S: Final = 2.0
_MOST_DISK_GB_PER_S: Final = 1.0
"""What was faster than this counts as this fast in the history of puts, and of a disk."""
_MOST_RATES: Final = 32
"""Sizes of pages, for gets and puts. A process has as many as its models have groups of layers."""
_NOT_MEASURED: Final = frozenset({"cancelled", "closed", "store_gone"})
"""Of a request that ends so, nothing is known: it ended early."""

StoreOp = Literal["get", "put"]
_J = TypeVar("_J", bound=Job[Any])


@attrs.define(eq=False)
class _Direction:
    found: Finding | None = None
    told: bool = False
    refused_until: float = float("-inf")


class StoreWatch:
    """Measures the gets and puts of one opened store, and keeps an alarm until it is told.

    ``tell(op, finding)`` is called once for each direction, in a thread of the store's user, at its next
    request; requests end in threads of the store. Thread-safe; its memory does not grow with use.
    """

    def __init__(self, medium: str, tell: Callable[[StoreOp, Finding], None], *, refuses: bool) -> None:
        """
        Args:
            medium: the store's (see ``Store.medium``).
            refuses: whether a direction that is slow is not used for :data:`REFUSED_S`.
        """
        self._disk = medium == "disk"
        self._tell = tell
        self._refuses = refuses
        self._lock = threading.Lock()
        self._shared = SharedTime()
        self._rates: dict[tuple[StoreOp, int], PathRate] = {}
        self._directions: dict[StoreOp, _Direction] = {"get": _Direction(), "put": _Direction()}
        self.due = False
        """There is an alarm to tell, or a direction is refused."""

    def begins(self, now: float) -> float:
        """A request is going to be made. Returns what :meth:`ends` needs."""
        return self._shared.begins(now)

    def ends(self, op: StoreOp, shared: float, now: float, page_nbytes: int, results: Sequence[Any]) -> None:
        """It has ended, with these results."""
        seconds = self._shared.ends(now) - shared
        if page_nbytes * len(results) < LEAST_BYTES:
            return
        kept = results.count(None)
        nbytes = page_nbytes * kept
        if nbytes < LEAST_BYTES or (kept < len(results) and not _NOT_MEASURED.isdisjoint(results)):
            return
        rate = self._rates.get((op, page_nbytes)) or self._new_rate(op, page_nbytes)
        found = None if rate is None else rate.sent(nbytes, seconds)
        if found is not None:
            with self._lock:
                self._directions[op].found, self.due = found, True

    def _new_rate(self, op: StoreOp, page_nbytes: int) -> PathRate | None:
        most = float("inf") if op == "get" else _MOST_PUT_GB_PER_S
        if self._disk:
            most = min(most, _MOST_DISK_GB_PER_S)
        with self._lock:
            if len(self._rates) >= _MOST_RATES:
                return None
            made = PathRate(None, factor=FACTOR, keeps_best=True, most_gb_per_s=most)
            return self._rates.setdefault((op, page_nbytes), made)

    def heed(self, op: StoreOp) -> bool:
        """Tell what is due. Returns whether a request of this direction is refused now."""
        now = time.monotonic()
        fresh: list[tuple[StoreOp, Finding]] = []
        with self._lock:
            for name, direction in self._directions.items():
                found, direction.found = direction.found, None
                if found is None:
                    continue
                if self._refuses:
                    direction.refused_until = now + REFUSED_S
                if not direction.told:
                    direction.told = True
                    fresh.append((name, found))
            self.due = any(now < each.refused_until for each in self._directions.values())
            refused = now < self._directions[op].refused_until
        for each in fresh:
            self._tell(*each)
        return refused


class MeasuredStore(StoreWrapper):
    """Measures the gets and puts of another store, and is otherwise that store until it is refused.

    Of a store that is refused no page is there, and none can be got or put, for the reason ``slow``.
    """

    def __init__(self, store: Store, watch: StoreWatch) -> None:
        super().__init__(store)
        self._watch = watch

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        if self._is_refused("get"):  # what cannot be loaded is not promised
            job: Job[Presence] = Job(len(keys), Deadline.after(0.0))
            job.set([Presence.ABSENT] * len(keys))
            return job
        return self.store.submit_lookup(keys, lease_s=lease_s, timeout=timeout)

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        if self._is_refused("put"):
            self.store.withdraw(pages.keys)
            if isinstance(pages.memory, PageBuffers):
                self.store.free(pages.memory)
            job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(0.0))
            job.set([PutReason.SLOW] * len(pages.keys))
            return job
        return self._measured("put", pages, lambda: self.store.submit_put(pages, timeout=timeout))

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        if self._is_refused("get"):
            job = GetJob(len(pages.keys), pages.series.format.num_layers, Deadline.after(0.0))
            job.set([MissReason.SLOW] * len(pages.keys))
            return job
        return self._measured("get", pages, lambda: self.store.submit_get(pages, timeout=timeout))

    def _is_refused(self, op: StoreOp) -> bool:
        """Whether the store is too slow to be asked; an alarm that is due is told. A closed one says so."""
        return self._watch.due and self._watch.heed(op) and not self.store.is_lost

    def _measured(self, op: StoreOp, pages: PageRequest, submit: Callable[[], _J]) -> _J:
        watch, nbytes = self._watch, pages.series.format.nbytes
        shared = watch.begins(time.perf_counter())
        try:
            job = submit()
        except BaseException:
            watch.ends(op, shared, time.perf_counter(), nbytes, ())
            raise
        job.add_done_callback(
            lambda ended: watch.ends(op, shared, time.perf_counter(), nbytes, ended.results() or ())
        )
        return job

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        try:
            super().close(timeout)
        finally:
            if self._watch.due:
                self._watch.heed("get")
