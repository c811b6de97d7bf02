"""Uses a store as the page cache of an engine that has its own keys and memory."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import attrs

from kvplug.errors import ClosedError, KvplugError, LayoutError
from kvplug.metrics.reasons import reason_of
from kvplug.metrics.stats import TransferStats
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.transport.store.format import pieces_format
from kvplug.transport.store.job import Job
from kvplug.transport.store.keys import Series, foreign_key
from kvplug.transport.store.memory import PagePieces
from kvplug.transport.store.results import MissReason, Presence, PutReason, Usage
from kvplug.transport.store.store import PageRequest, Store, ended

_log = logging.getLogger(__name__)

_R = TypeVar("_R", PutReason, MissReason)

_ORDINARY: Final = frozenset({"absent", "evicted", "expired", "cancelled", "closed"})
"""Reasons that do not concern the store's health."""
_MANY: Final = 1000
"""More leases than this: the expired ones are removed. More sizes of pages than this: all are removed."""


@attrs.frozen(kw_only=True)
class FlatPage:
    """One page of another engine's cache."""

    key: bytes
    """The engine's complete key for the page."""
    view: memoryview
    """The page's bytes, contiguous. The view keeps their memory alive."""
    more: Sequence[memoryview] = ()
    """Further pieces of the page that lie elsewhere, in order. The store keeps all pieces as one page."""
    layout: bytes = b""
    """Properties of the bytes that the key omits (dtype, shape). A page that was put with another layout or
    length is a miss."""

    @property
    def pieces(self) -> tuple[memoryview, ...]:
        """All pieces of the page, in order."""
        return (self.view, *self.more)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths of the pieces, in bytes."""
        return tuple(piece.nbytes for piece in self.pieces)


class PageCache:
    """A store as the page cache of an engine that has keys of its own, and whose pages are flat bytes.

    Law. Every call returns at once. Every job ends by its deadline, or later if the store cannot stop a copy
    that is under way; when it is done, nothing accesses the memory of its pages. If the store fails, a get
    misses or a put does not keep the page. The reason is counted, and logged once. No call raises because of
    it, even after :meth:`close`. A page is found only by an engine with the same name, namespace and key, and
    only with the layout and length that it was put with.

    Callers. Adapters of engines, from any thread.

    Not promised. As for :class:`~kvplug.transport.Store`: a put may not keep a page, and a kept page may be
    gone before a get.
    """

    def __init__(
        self,
        store: Store,
        *,
        engine: str,
        namespace: bytes = b"",
        timeout_s: float = 30.0,
        stats: TransferStats | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Take ownership of ``store``.

        Args:
            engine: name of the engine; pages of engines with other names are never found.
            namespace: all that determines the content of pages besides their keys.
            timeout_s: the default deadline.
            stats: counters for the store, see :attr:`stats`.
            on_close: called once, after the store is closed.
        """
        self.store = store
        """The store that keeps the pages."""
        self.stats = TransferStats() if stats is None else stats
        """Counts pages that were looked up, put and got, and failures by reason."""
        name = engine.encode()
        # includes the seal, so that a page with another protection counts as absent, not as a wrong format
        self._namespace = b"".join(
            len(part).to_bytes(8, "little") + part for part in (name, namespace, store.seal.id)
        )
        self._engine = engine
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_live = 0
        self._leases = LeaseCounts()
        self._logged: set[tuple[str, str]] = set()
        self._series: dict[tuple[tuple[int, ...], bytes], Series] = {}

    def __repr__(self) -> str:
        return f"<pages of {self._engine} in {self.store!r}>"

    # -- jobs ----------------------------------------------------------------------------------

    def lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        """Look up whether the store has the pages.

        ``lease_s``: if the store has leases, held pages are not evicted for this long, or until
        :meth:`release` was called once for each lookup that found them.
        """
        own, deadline = self._keys(keys), Deadline.after(timeout, self._timeout_s)
        if lease_s:
            self._leases.hold(own, lease_s)  # before the answer, so that no earlier lease's release ends it
        try:
            job = self.store.submit_lookup(own, lease_s=lease_s, timeout=timeout)
        except Exception as e:
            self._failed("lookup", e, len(keys))
            job = ended(Job(len(keys), deadline), Presence.ABSENT)
        if lease_s:
            job.add_done_callback(lambda done: self._keep_leases(own, done.results() or ()))
        return job

    def _keep_leases(self, keys: Sequence[bytes], found: Sequence[Presence]) -> None:
        """Release the leases of a lookup on the pages that it did not find."""
        self._release([key for key, held in zip(keys, found, strict=True) if held is not Presence.HELD])

    def is_leased(self, key: bytes) -> bool:
        """Whether :meth:`lookup` has a lease on the page."""
        return self._leases.is_leased(foreign_key(self._namespace, key))

    @property
    def num_leased(self) -> int:
        """How many pages have leases."""
        return len(self._leases)

    def put(self, pages: Sequence[FlatPage], *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        """Keep copies of the pages. Result: ``None`` for a page that the store has now, else the reason."""
        return self._submitted(
            "put", pages, self.store.submit_put, (PutReason.CLOSED, PutReason.OTHER), timeout
        )

    def get(self, pages: Sequence[FlatPage], *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[MissReason | None]:
        """Fill the pages' memory. Result: ``None`` for a page that was copied and verified, else the reason.
        The memory of a missed page never receives bytes of another page."""
        return self._submitted(
            "get", pages, self.store.submit_get, (MissReason.CLOSED, MissReason.OTHER), timeout
        )

    def remove(self, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        """Remove the pages from the store. Result: whether each is gone."""
        deadline = Deadline.after(timeout, self._timeout_s)
        try:
            return self.store.submit_remove(self._keys(keys), timeout=timeout)
        except Exception as e:
            self._failed("remove", e, 0)
            return ended(Job(len(keys), deadline), False)

    def release(self, keys: Sequence[bytes]) -> None:
        """Release one lease of :meth:`lookup` on each page. The last one on a page ends the store's lease."""
        self._release(self._keys(keys))

    def _release(self, own: Sequence[bytes]) -> None:
        last = self._leases.release(own)
        try:
            if last:
                self.store.release(last)
        except Exception as e:
            self._failed("release", e, 0)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the pages were used outside the store, so that it evicts them later."""
        try:
            self.store.touch(self._keys(keys))
        except Exception as e:
            self._failed("touch", e, 0)

    # -- state and closing ---------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return what the store holds; no pages, bytes or budget if the store is closed or fails."""
        try:
            return self.store.usage()
        except KvplugError:
            return Usage(num_pages=0, used_bytes=0, budget_bytes=None)

    @property
    def failures(self) -> Mapping[str, Mapping[str, int]]:
        """How many pages failed, by operation (such as ``"get"``) and reason."""
        found: Mapping[str, Mapping[str, int]] = self.stats.snapshot()["failures"]
        return found

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> bool:
        """End every job, and close the store. Idempotent.

        Puts that have begun are finished within ``timeout``; gets end as ``CLOSED``.

        Returns: whether the memory of every job is free. False only if a copy hangs.
        """
        deadline = Deadline.after(timeout, self._timeout_s)
        try:
            self.store.close(deadline.remaining())
        except Exception as e:
            _log.warning("closing %r failed: %s: %s", self.store, type(e).__name__, e)
        with self._lock:
            while self._num_live:
                if not self._idle.wait(deadline.remaining()) and deadline.expired:
                    break
            is_idle = not self._num_live
            on_close, self._on_close = self._on_close, lambda: None
        on_close()
        return is_idle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- internals -----------------------------------------------------------------------------

    def _keys(self, keys: Sequence[bytes]) -> list[bytes]:
        return [foreign_key(self._namespace, key) for key in keys]

    def _series_of(self, sizes: tuple[int, ...], layout: bytes) -> Series:
        found = self._series.get((sizes, layout))
        if found is None:
            if len(self._series) > _MANY:  # most engines have a few, but each page may have its own length
                self._series.clear()
            found = Series(pieces_format(sizes), shard=layout, seal=self.store.seal.id)
            self._series[sizes, layout] = found
        return found

    def _submitted(
        self,
        op: str,
        pages: Sequence[FlatPage],
        submit: Callable[..., Job[_R | None]],
        refusals: tuple[_R, _R],
        timeout: Timeout,
    ) -> Job[_R | None]:
        """Submit one request to the store for each length and layout of pages. The job is done when all
        requests have settled.

        ``refusals``: the result if the store is closed, and the result if it fails in another way.
        """
        groups: dict[tuple[tuple[int, ...], bytes], list[int]] = {}
        for index, page in enumerate(pages):
            groups.setdefault((page.sizes, page.layout), []).append(index)
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._lock:
            self._num_live += 1
        parts = [
            (self._submitted_part(op, [pages[at] for at in group], submit, refusals, deadline), group)
            for group in groups.values()
        ]
        whole = Job[_R | None](len(pages), deadline)
        results: list[_R | None] = [None] * len(pages)
        left = [part for part, _ in parts]

        def cancel() -> None:
            for part, _ in parts:
                part.cancel()

        def note(group: Sequence[int], part: Job[_R | None]) -> None:
            for index, result in zip(group, part.results() or (), strict=True):
                results[index] = result
            with self._lock:
                left.remove(part)
                is_last = not left
            if is_last:
                end()

        def end() -> None:
            whole.set(results)
            self._ended(op, results)

        whole.on_cancel(cancel)
        for part, group in parts:
            part.add_settled_callback(functools.partial(note, group))
        if not parts:
            end()
        return whole

    def _submitted_part(
        self,
        op: str,
        pages: Sequence[FlatPage],
        submit: Callable[..., Job[_R | None]],
        refusals: tuple[_R, _R],
        deadline: Deadline,
    ) -> Job[_R | None]:
        """Submit pages of one length and layout."""
        try:
            request = PageRequest(
                series=self._series_of(pages[0].sizes, pages[0].layout),
                keys=self._keys([page.key for page in pages]),
                identities=[self._namespace + page.key for page in pages],
                memory=PagePieces([page.pieces for page in pages]),
            )
            return submit(request, timeout=deadline.remaining())
        except Exception as e:
            self._failed(op, e, len(pages))
            return ended(Job(len(pages), deadline), refusals[0 if isinstance(e, ClosedError) else 1])

    def _ended(self, op: str, results: Sequence[Any]) -> None:
        for reason, count in Counter(results).items():
            if reason is not None:
                self._log_once(op, str(reason), f"{count} of {len(results)} pages")
        with self._lock:
            self._num_live -= 1
            self._idle.notify_all()

    def _failed(self, op: str, error: Exception, count: int) -> None:
        """Count and log an error that a call to the store raised instead of returning results."""
        if isinstance(error, LayoutError):
            _log.error("memory of %s cannot be used: %s", self._engine, error)
        reason = str(reason_of(error))
        if count:
            self.stats.fail(op, reason, count=count)
        self._log_once(op, reason, f"{type(error).__name__}: {error}")

    def _log_once(self, op: str, reason: str, what: str) -> None:
        """Log the first failure of each kind, unless the kind is ordinary. The counters cover the others."""
        with self._lock:
            if reason in _ORDINARY or (op, reason) in self._logged:
                return
            self._logged.add((op, reason))
        _log.warning(
            "%s of the pages of %s failed (%s: %s); further failures of this kind are only counted",
            op,
            self._engine,
            reason,
            what,
        )


class LeaseCounts:
    """Counts the leases on keys. A lease that is not released ends after its time, as in the store.

    Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[bytes, tuple[int, float]] = {}
        """The number of leases on each key, and when they end."""
        self._purge_at = _MANY

    def __len__(self) -> int:
        """How many keys have leases."""
        with self._lock:
            self._purge()
            return len(self._leases)

    def hold(self, keys: Sequence[bytes], lease_s: float) -> None:
        """Add a lease on each key. All leases on the key last at least this long."""
        with self._lock:
            now = self._clock()
            for key in keys:
                count, until = self._leases.get(key, (0, now))
                self._leases[key] = (count if until > now else 0) + 1, max(until, now + lease_s)
            if len(self._leases) >= self._purge_at:
                self._purge()
                self._purge_at = max(_MANY, 2 * len(self._leases))

    def release(self, keys: Sequence[bytes]) -> list[bytes]:
        """Release one lease on each key. Returns the keys that have no lease left."""
        last = []
        with self._lock:
            for key in keys:
                count, until = self._leases.pop(key, (0, 0.0))
                if count > 1:
                    self._leases[key] = count - 1, until
                elif count:
                    last.append(key)
        return last

    def is_leased(self, key: bytes) -> bool:
        """Whether the key has a lease that has not expired."""
        with self._lock:
            return self._leases.get(key, (0, 0.0))[1] > self._clock()

    def _purge(self) -> None:
        now = self._clock()
        self._leases = {key: lease for key, lease in self._leases.items() if lease[1] > now}
