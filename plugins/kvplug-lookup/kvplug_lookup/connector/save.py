"""Saves the pages that a step completes: the model's thread gathers them, the stores keep them afterwards.

The store reads pages that are not gathered from the engine's blocks: all pages of a cache on a device, and
pages of another cache if the store or ``max_unsaved`` leaves no memory for them. Until they are read, the
blocks are *lent*: the scheduler side keeps the blocks of a request that has ended. If a request is preempted
or aborted, its unread pages are given up.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from kvplug import KvplugError
from kvplug.engine import ConnectorContext, PageBlocks, StalledError
from kvplug.transport import (
    BackgroundThread,
    Job,
    PageBuffers,
    PageCopy,
    PageMemory,
    PageRequest,
    PageRows,
    Presence,
    PutReason,
    Series,
    Store,
)
from kvplug_lookup.connector.groups import Groups
from kvplug_lookup.connector.plan import SavePlan
from kvplug_lookup.connector.warnings import CountedWarnings, at_location

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_MAX_BEHIND = 64
"""Limit on batches that wait to be copied between stores. Others are given up: one store has their pages."""
_TIMED_BYTES = 128 << 20
"""How many bytes a store may save in ``save_timeout_s``."""
_CLOSE_S = 5.0


Page = tuple[bytes, bytes]
"""The chain and the identity of a page."""


@attrs.define(eq=False)
class Tier:
    """One store of the config, and the series of this worker's pages in it."""

    name: str
    store: Store
    series: Series

    def request(self, pages: Sequence[Page], memory: PageMemory, *, is_use: bool = True) -> PageRequest:
        """A put of these pages from memory, or a get into it."""
        keys = self.series.keys_of([chain for chain, _ in pages])
        identities = [identity for _, identity in pages]
        return PageRequest(series=self.series, keys=keys, identities=identities, memory=memory, is_use=is_use)


@attrs.define(eq=False)
class _Batch:
    """Pages of one request that a step completes."""

    request_id: str
    traceparent: str
    step: int
    first_page: int
    """Number of the first page in the sequence."""
    block_ids: frozenset[int]
    chains: list[bytes]
    identities: list[bytes]
    source: PageBlocks
    memory: PageBuffers | None
    """Memory to gather them into; ``None``: the store reads them from the cache."""
    started: float
    job: Job[PutReason | None] | None = None

    def gather(self) -> None:
        """Copy the pages into ``memory``, if there is memory for them."""
        if self.memory is not None:
            copy = PageCopy(self.source)
            copy.use(0, self.memory.rows())
            copy.save(range(len(self.chains)))

    @property
    def pages(self) -> list[Page]:
        return list(zip(self.chains, self.identities, strict=True))

    @property
    def nbytes(self) -> int:
        return len(self.chains) * self.source.format.nbytes


@attrs.define(eq=False, repr=False, slots=False)
class Saver:
    """Gathers each layer once it is computed, and puts whole pages into the first store.

    A failed save only costs a later recomputation: it is counted with its reason, and never raised.
    """

    _context: ConnectorContext
    _tiers: Sequence[Tier]
    _groups: Groups
    _views: Sequence[Sequence[Tensor]]
    _warnings: CountedWarnings

    def __attrs_post_init__(self) -> None:
        self._stats, options = self._context.stats, self._context.options
        self._timeout_s: float = options.save_timeout_s
        self._wait_timeout_s: float = options.wait_timeout_s
        self._max_bytes: int = options.max_unsaved or self._context.config.buffer_size
        self._gathers = self._views[0][0].device.type == "cpu"
        self._has_warned = False
        self._batches: list[_Batch] = []
        """Batches of this step."""
        self._lent: list[_Batch] = []
        """Batches of earlier steps whose blocks a store may still read."""
        self._step = -1
        """The latest step with pages to save."""
        self._lock = threading.Lock()
        self.bytes_unsaved = 0
        """Bytes of pages that are being gathered, or wait to be saved."""
        self._settled: list[bytes] = []
        self._unsaved_from: dict[str, int] = {}
        """By request, the first page that was not saved."""
        self._num_resets = 0
        self._behind: queue.SimpleQueue[tuple[int, str, list[Page]] | None] = queue.SimpleQueue()
        self.num_behind = 0
        """Number of batches that wait to be copied from one store to another."""
        self._closed = False
        self._thread: BackgroundThread | None = None

    @property
    def first(self) -> Tier:
        """The tier that pages are saved into."""
        return self._tiers[0]

    # -- on the model's thread -----------------------------------------------------------------

    def begin(self, step: int, plans: Sequence[SavePlan]) -> None:
        """Begin a step: allocate memory for the pages that it completes, and declare them to the store."""
        for plan in plans:
            self._step = step
            try:
                self._begin_one(plan)
            except KvplugError as e:
                chains, _ = plan.pages(self.first.series.format.page_tokens)
                self._give_up(str(e), "other", plan.request_id, plan.first_page, chains)

    def _begin_one(self, plan: SavePlan) -> None:
        tier = self.first
        form = tier.series.format
        chains, identities = plan.pages(form.page_tokens)
        keys = tier.series.keys_of(chains)
        self._compare(tier, plan.first_page + len(chains))
        if plan.num_announced < len(keys):
            tier.store.expect_reader(keys[plan.num_announced :])
        # A store in this process answers at once. Pages that it holds are not gathered again.
        held = tier.store.submit_lookup(keys, timeout=self._wait_timeout_s).results()
        begin, end = 0, len(chains)
        if held is not None:
            wanted = [at for at, found in enumerate(held) if found is not Presence.HELD]
            if not wanted:
                self._settle(chains)
                return
            begin, end = wanted[0], wanted[-1] + 1
            self._settle([*chains[:begin], *chains[end:]])
        tier.store.declare(tier.series, keys[begin:end], timeout=self._wait_timeout_s)
        memory, count = self._allocate(self._room(end - begin, form.nbytes)) if self._gathers else (None, 0)
        for first, last, where in ((begin, begin + count, memory), (begin + count, end, None)):
            if first == last:
                continue
            first_token = (plan.first_page + first) * form.page_tokens
            batch = _Batch(
                plan.request_id,
                plan.traceparent,
                self._step,
                plan.first_page + first,
                frozenset(itertools.chain.from_iterable(plan.block_ids)),
                chains[first:last],
                identities[first:last],
                self._groups.pages(form, self._views, plan.block_ids, first_token, last - first),
                where,
                time.perf_counter(),
            )
            self._count_bytes(batch, 1)
            self._batches.append(batch)

    def _compare(self, tier: Tier, num_pages: int) -> None:
        """Warn once about a prompt that is larger than the store."""
        form, budget = tier.series.format, tier.store.usage().budget_bytes
        if self._has_warned or budget is None or num_pages * form.nbytes <= budget:
            return
        self._has_warned = True
        _log.warning(
            "a prompt of %d tokens takes %d MiB, but the store %r only holds %d MiB: it is not loaded whole;"
            " raise options.%s.size",
            num_pages * form.page_tokens,
            num_pages * form.nbytes >> 20,
            tier.name,
            budget >> 20,
            tier.name,
        )

    def _allocate(self, count: int) -> tuple[PageBuffers | None, int]:
        """Allocate memory of the first store for up to ``count`` pages. Return it and their number."""
        while count:
            memory = self.first.store.allocate(self.first.series, count)
            if memory is not None:
                return memory, count
            count //= 2
        return None, 0

    def spoil(self, suspect: frozenset[int]) -> frozenset[str]:
        """Give up pages in these blocks. Return their requests."""
        spoilt = [batch for batch in self._batches if not suspect.isdisjoint(batch.block_ids)]
        for batch in spoilt:
            self._drop(batch)
        return frozenset(batch.request_id for batch in spoilt)

    def forget(self, request_id: str) -> None:
        """Stop all reads of the blocks of a request that ended, was preempted, or has wrong KV."""
        for batch in [batch for batch in self._batches if batch.request_id == request_id]:
            self._drop(batch)
        self._take_back([batch for batch in self._lent if batch.request_id == request_id])

    def _take_back(self, batches: Sequence[_Batch]) -> None:
        """Give up pages that no store has begun to read. Wait until the engine may use the blocks again: at
        most the time of one copy."""
        timeout_s = self._context.config.timeout_s
        for batch in batches:
            if batch.job is not None and not batch.job.take_back(timeout_s):
                raise StalledError(
                    f"the store {self.first.name!r} still reads blocks {timeout_s:g} s after a"
                    " save was given up: restart this engine and the process of that store"
                )

    def _drop(self, batch: _Batch) -> None:
        self._batches.remove(batch)
        tier = self.first
        if batch.memory is not None:
            tier.store.free(batch.memory)
        tier.store.withdraw(tier.series.keys_of(batch.chains))
        self._count_bytes(batch, -1)
        self._settle(batch.chains)

    def end(self) -> None:
        """End the step: put its pages, which are whole now."""
        for batch in self._batches:
            batch.gather()
        batches, self._batches = self._batches, []
        tier = self.first
        with tier.store.together():
            for batch in batches:
                self._put(tier, batch)
        if self._groups.has_windows:  # the engine may reuse blocks outside a window
            self._take_back(self._lent)

    def _put(self, tier: Tier, batch: _Batch) -> None:
        memory = batch.source if batch.memory is None else batch.memory
        request = tier.request(batch.pages, memory)
        try:
            timeout = self._timeout_s * -(-batch.nbytes // _TIMED_BYTES)
            job = batch.job = tier.store.submit_put(request, timeout=timeout)
        except KvplugError as e:
            self._count_bytes(batch, -1)
            self._give_up(str(e), "closed", batch.request_id, batch.first_page, batch.chains)
            return
        if batch.memory is None:
            self._lent.append(batch)
        job.add_done_callback(self._noting(batch))

    def reset(self, shard_series: dict[str, Series]) -> None:
        """Drop everything gathered so far, and clear the stores that are not shared."""
        for batch in list(self._batches):
            self._drop(batch)
        self._take_back(self._lent)
        with self._lock:
            self._num_resets += 1
            for tier in self._tiers:
                if tier.store.is_shared:
                    tier.series = shard_series[tier.name]
        for tier in self._tiers:
            if not tier.store.is_shared:
                tier.store.submit_remove(None)

    def lends(self, request_id: str) -> bool:
        """Whether a store may still read the blocks of this request."""
        self._end_loans()
        return any(batch.request_id == request_id for batch in (*self._batches, *self._lent))

    @property
    def read_until(self) -> int:
        """The latest step up to which all pages were read from the engine's blocks."""
        self._end_loans()
        return min((batch.step for batch in (*self._batches, *self._lent)), default=self._step + 1) - 1

    def _end_loans(self) -> None:
        self._lent = [batch for batch in self._lent if batch.job is not None and not batch.job.settled]

    # -- from other threads --------------------------------------------------------------------

    def take_unsaved(self) -> dict[str, int]:
        """Return, by request, the first page that was not saved since the last call."""
        with self._lock:
            unsaved, self._unsaved_from = self._unsaved_from, {}
            return unsaved

    def take_settled(self) -> list[bytes]:
        """Return the chains of pages that were saved in the first store, or given up, since the last call."""
        with self._lock:
            settled, self._settled = self._settled, []
            return settled

    def _noting(self, batch: _Batch) -> Callable[[Job[PutReason | None]], None]:
        num_resets, series = self._num_resets, self.first.series

        def note(job: Job[PutReason | None]) -> None:
            results = job.results() or []
            kept = [reason is None for reason in results]
            seconds = time.perf_counter() - batch.started
            page_tokens = series.format.page_tokens
            span = self._context.spans.record(
                "save",
                batch.request_id,
                batch.started,
                parent=batch.traceparent,
                reason=next((str(reason) for reason in results if reason is not None), ""),
                source=self.first.name,
                num_pages=len(kept),
            )
            if any(kept):
                self._stats.record(
                    "save",
                    sum(kept) * series.format.nbytes,
                    seconds,
                    tokens=sum(kept) * page_tokens,
                    trace_id=span.trace_id,
                )
            for reason, count in Counter(results).items():
                if reason is not None:
                    self._stats.fail("save", str(reason), count=count)
                    if reason is not PutReason.CANCELLED:
                        self._warn(count, self.first, str(reason))
            if not all(kept):
                self._miss(batch.request_id, batch.first_page + kept.index(False))
            self._settle(batch.chains)
            if len(self._tiers) > 1 and num_resets == self._num_resets:
                self._later(num_resets, self.first.name, list(itertools.compress(batch.pages, kept)))
            self._count_bytes(batch, -1)

        return note

    def _settle(self, chains: Sequence[bytes]) -> None:
        with self._lock:
            self._settled += chains

    def _room(self, count: int, page_bytes: int) -> int:
        """How many of these pages may be gathered: at least one if no page waits to be saved."""
        with self._lock:
            free = max(self._max_bytes - self.bytes_unsaved, 0 if self.bytes_unsaved else page_bytes)
            return max(0, min(count, free // page_bytes))

    def _count_bytes(self, batch: _Batch, sign: int) -> None:
        with self._lock:
            self.bytes_unsaved += sign * batch.nbytes

    def _miss(self, request_id: str, page: int) -> None:
        with self._lock:
            self._unsaved_from[request_id] = min(page, self._unsaved_from.get(request_id, page))

    def _warn(self, count: int, tier: Tier, why: str) -> None:
        where = at_location(tier.name, tier.store.location)
        self._warnings.warn(count, f"pages could not be saved in the store {where}: {why}")

    def _give_up(
        self, error: str, reason: str, request_id: str, first_page: int, chains: Sequence[bytes]
    ) -> None:
        self._warn(len(chains), self.first, error)
        self._stats.fail("save", reason)
        self._miss(request_id, first_page)
        self._settle(chains)

    # -- between stores ------------------------------------------------------------------------

    def promote(self, name: str, pages: list[Page]) -> None:
        """Copy pages that were loaded from a later store into the first one. Does not wait."""
        if any(tier.name == name for tier in self._tiers[1:]):
            self._later(self._num_resets, name, pages)

    def _later(self, num_resets: int, source: str, pages: list[Page]) -> None:
        with self._lock:
            if self._closed or not pages:
                return
            is_possible = self.num_behind < _MAX_BEHIND and self._has_thread()
            if is_possible:
                self.num_behind += 1
                self._behind.put((num_resets, source, pages))
        if not is_possible:
            self._stats.fail("copy", "no_room")

    def _has_thread(self) -> bool:
        """Start the thread if needed. Needs the lock. Return whether it runs."""
        if self._thread is None:
            thread = BackgroundThread(self._run, name="kvplug-lookup-behind", stop=self.close)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while (batch := self._behind.get()) is not None:
            num_resets, source, pages = batch
            try:
                if num_resets == self._num_resets:
                    self._copy(num_resets, source, pages)
            except KvplugError as e:
                _log.debug("could not copy pages to another store: %s", e)
            except Exception:
                _log.exception("copying pages to another store failed")
            finally:
                with self._lock:
                    self.num_behind -= 1

    def _copy(self, num_resets: int, name: str, pages: list[Page]) -> None:
        """Copy pages from a later store into the first one, or from the first one into each later one."""
        source = next(tier for tier in self._tiers if tier.name == name)
        for target in self._tiers[1:] if source is self.first else (self.first,):
            begun = time.perf_counter()
            keys = target.series.keys_of([chain for chain, _ in pages])
            found = target.store.submit_lookup(keys, timeout=self._timeout_s).wait(self._timeout_s + 1)
            wanted = [page for page, each in zip(pages, found, strict=True) if each is not Presence.HELD]
            if not wanted:
                continue
            results = self._copied(num_resets, source, target, wanted)
            seconds = time.perf_counter() - begun
            for reason, count in Counter(results).items():
                if reason is None:
                    self._stats.record("copy", source.series.format.nbytes, seconds, count=count)
                else:
                    self._stats.fail("copy", str(reason), count=count)
                    self._warn(count, target, str(reason))

    def _copied(
        self, num_resets: int, source: Tier, target: Tier, pages: list[Page]
    ) -> list[PutReason | None]:
        """Copy the held pages from one store to another. Return the results of the put."""
        memory = PageBuffers.empty(source.series.format, len(pages))
        request = source.request(pages, memory, is_use=False)
        got = source.store.submit_get(request, timeout=self._timeout_s).wait(self._timeout_s + 1)
        there = [at for at, missed in enumerate(got) if missed is None]
        if not there:
            return []
        rows = memory.rows()
        rows = PageRows(rows.buffer, [rows.offsets[at] for at in there], rows.nbytes)
        with self._lock:  # so that a reset also forgets these pages, or comes before they were read
            if num_resets != self._num_resets:
                return []
            request = target.request([pages[at] for at in there], PageBuffers(memory.format, rows))
            job = target.store.submit_put(request, timeout=self._timeout_s)
        return job.wait(self._timeout_s + 1)

    def close(self) -> None:
        """Stop copying between stores. Idempotent; the owner closes the stores, before or after."""
        with self._lock:
            self._closed = True
            self._num_resets += 1
        self._behind.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_S)
