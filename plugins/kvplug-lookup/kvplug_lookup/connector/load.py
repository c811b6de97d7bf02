"""Loads the pages of one request into its blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug import KvplugError, TimeoutError
from kvplug.engine import ConnectorContext, StalledError, reason_of
from kvplug.transport import (
    Deadline,
    DeviceMark,
    GetJob,
    MissReason,
    PageRequest,
    Series,
    Store,
)
from kvplug_lookup.connector.groups import Groups
from kvplug_lookup.connector.plan import LoadPlan

if TYPE_CHECKING:
    from torch import Tensor

_LASTING: Final = frozenset(
    {MissReason.UNREADABLE, MissReason.FORMAT, MissReason.IDENTITY, MissReason.FORGED}
)
"""Reasons that persist until the page is replaced."""


@attrs.define(eq=False)
class Part:
    """Consecutive pages of a load from one source."""

    source: str
    first: int
    """Number of the first page among those of the load."""
    count: int
    route: str = ""
    """The route of its pages, for display."""
    is_verified: bool = False
    job: GetJob | None = None
    begun_at: float = 0.0
    """When the store was asked; :attr:`ended_at`: when it was done. By ``time.monotonic``; 0: not yet."""
    ended_at: float = 0.0
    error: Exception | None = None
    """Why the source could not be asked."""
    is_asking: bool = False
    """The source is being asked: there is no job to cancel yet, and pages may arrive."""


@attrs.define(eq=False, repr=False, slots=False)
class Load:
    """Loads pages into one request's blocks, layer by layer.

    It ends when every page is loaded or missed. Pages from the first missed one on count as failed: their
    blocks are computed again."""

    plan: LoadPlan
    _context: ConnectorContext
    _groups: Groups
    _views: Sequence[Sequence[Tensor]]
    _page_tokens: int
    _progressed_at: Callable[[str], float]
    """When something last arrived from a source for any load, by ``time.monotonic``."""
    _after: DeviceMark
    """The work that the caches' device must complete before the blocks are written."""

    def __attrs_post_init__(self) -> None:
        self.deadline = Deadline.after(self._context.config.timeout_s)
        self._stall_timeout_s: float = self._context.options.stall_timeout_s
        self._chains, self._identities = self.plan.pages(self._page_tokens)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.error: BaseException | None = None
        """Why it failed; ``None`` while it is under way and after success."""
        self._first_missed = len(self._chains)
        self.parts: list[Part] = []
        at = 0
        rank = self._context.parallelism.worker_rank
        for source, count in self.plan.sources[rank] if self.plan.sources else ():
            self.parts.append(Part(source, at, count))
            at += count
        self._began_at = time.monotonic()
        self.stalled: str | None = None
        """The source that nothing arrived from."""
        self.slow: str | None = None
        """The source that was refused because it is slow."""
        self.failed_source = ""
        """The first source with a missed page."""
        self.reason = ""
        """Why that page was missed."""

    @property
    def request_id(self) -> str:
        return self.plan.request_id

    @property
    def route(self) -> str:
        """Its sources and their routes, for display."""
        return "; ".join(": ".join(filter(None, (part.source, part.route))) for part in self.parts)

    def pages_of(self, part: Part) -> tuple[list[bytes], list[bytes]]:
        """The chains of a part's pages, and their identities."""
        pages = slice(part.first, part.first + part.count)
        return self._chains[pages], self._identities[pages]

    def status(self) -> dict[str, str | float]:
        """Return what it is and how long it has run, for display."""
        sources = ", ".join(dict.fromkeys(part.source for part in self.parts))
        seconds = time.monotonic() - self._began_at
        return {"request_id": self.request_id, "source": sources, "seconds": seconds}

    # -- asking --------------------------------------------------------------------------------

    def begin(self, part: Part, store: Store, series: Series) -> None:
        """Ask a source for its part. Thread-safe; never waits."""
        plan, form = self.plan, series.format
        chains, identities = self.pages_of(part)
        first_token = (plan.first_page + part.first) * form.page_tokens
        writable = range(
            max(plan.start, first_token), min(plan.end, first_token + part.count * form.page_tokens)
        )
        with self._lock:
            if self.error is not None:
                return
            part.is_asking = True
        try:
            self._groups.check_load(plan.block_ids, plan.start, plan.end)
            request = PageRequest(
                series=series,
                keys=series.keys_of(chains),
                identities=identities,
                memory=self._groups.pages(
                    form,
                    self._views,
                    plan.block_ids,
                    first_token,
                    part.count,
                    writable=writable,
                    after=self._after,
                ),
                traceparent=plan.traceparent,
            )
            part.is_verified = store.seal.checksums
            part.begun_at = time.monotonic()
            job = store.submit_get(request, timeout=self.deadline.remaining())
            job.add_done_callback(lambda _: setattr(part, "ended_at", time.monotonic()))
            part.route = store.route
        except Exception as e:  # including errors inside a store: the engine continues
            self.give_up(part, e)
            return
        with self._lock:
            part.job, part.is_asking = job, False
            failed = self.error is not None
            self._changed.notify_all()
        if failed:
            job.cancel()

    def give_up(self, part: Part, error: Exception) -> None:
        """Note that the source cannot be asked."""
        with self._lock:
            part.error, part.is_asking = error, False
            self._changed.notify_all()

    # -- waiting -------------------------------------------------------------------------------

    def wait_for_layer(self, layer: int) -> None:
        """Wait until the layer is in the cache, or the load has failed: at the latest when nothing has
        arrived for ``stall_timeout_s``."""
        for part in self.parts:
            while not self._is_ready(part, layer):
                left = self._before_stall()
                if left <= 0:
                    self._give_up(part.source)
                    return
                if part.job is None:
                    with self._lock:
                        if part.job is None and part.error is None and self.error is None:
                            self._changed.wait(left)
                    continue
                try:
                    part.job.wait_for_layer(layer, left)
                except TimeoutError:
                    continue

    def _is_ready(self, part: Part, layer: int) -> bool:
        if self.error is not None or part.error is not None:
            return True
        return part.job is not None and (part.job.done or part.job.num_layers_ready > layer)

    def _before_stall(self) -> float:
        """Seconds that may still pass without anything arriving. While its source serves other loads, the
        load waits for its turn."""
        now = time.monotonic()
        last = self._began_at
        for part in self.parts:
            last = max(last, part.begun_at, part.job.progressed_at if part.job is not None else 0.0)
        if now - last >= self._stall_timeout_s and (source := self._waits_for()):
            last = max(last, self._progressed_at(source))
        return min(last + self._stall_timeout_s, self.deadline.at) - now

    def _waits_for(self) -> str:
        """The first source that has not finished; empty if all have."""
        return next((part.source for part in self.parts if part.job is None or not part.job.done), "")

    def check_stall(self) -> None:
        """Fail a background load if nothing has arrived for too long."""
        if not self.has_ended and self._before_stall() <= 0:
            self._give_up(self._waits_for())

    def _give_up(self, source: str) -> None:
        self.stalled = source
        pages = f"pages of request {self.request_id!r:.100} from {source!r}"
        if self.deadline.expired:
            self.fail(TimeoutError(f"not all {pages} arrived in time"))
        else:
            self.fail(StalledError(f"no {pages} arrived for {self._stall_timeout_s:g} s"))

    # -- the end -------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End a load that is not needed, or has failed. Nothing more is copied; missing pages have failed."""
        with self._lock:
            if self.error is None:
                self.error = error
            jobs = [part.job for part in self.parts if part.job is not None]
            self._changed.notify_all()
        for job in jobs:
            job.cancel()

    @property
    def has_ended(self) -> bool:
        """Whether every part is done or given up, and nothing more is copied into the blocks."""
        if self.error is not None:
            return all(not part.is_asking if part.job is None else part.job.settled for part in self.parts)
        return all(
            part.error is not None or (part.job is not None and part.job.done and part.job.settled)
            for part in self.parts
        )

    def wait_settled(self, timeout: float) -> bool:
        """Wait until nothing more is copied. Return whether that took at most ``timeout`` seconds."""
        deadline = Deadline.after(timeout)
        with self._lock:
            if not self._changed.wait_for(
                lambda: not any(part.is_asking for part in self.parts), deadline.remaining()
            ):
                return False
        return all(part.job is None or part.job.wait_settled(deadline.remaining()) for part in self.parts)

    def end(self) -> None:
        """Note the missed pages, and count the load."""
        ends = [part.ended_at for part in self.parts]
        ended = max(ends) if all(ends) else time.monotonic()  # a step ends later than its loads
        reason: str | None = None
        for part in self.parts:
            missed = self._missed_in(part)
            if missed is not None:
                at, reason = missed
                self._first_missed = part.first + at
                self.failed_source, self.reason = part.source, reason
                self.slow = part.source if reason == MissReason.SLOW else None
                break
        plan = self.plan
        if reason is not None:
            self._context.stats.fail("load", reason)
            if self.error is None:
                self.error = KvplugError(
                    f"a page of request {plan.request_id!r:.100} could not be loaded: {reason}"
                )
        elif self.error is not None and self._first_missed == len(self._chains):
            self.error = None  # everything had arrived before it was given up
        failure = "" if self.error is None else self.reason or str(reason_of(self.error))
        trace_id = self._record(ended, failure)
        if self.error is None:
            num_written = self._groups.num_written(plan.block_ids, plan.start, plan.end)
            nbytes = num_written * self._token_bytes()
            num_tokens = plan.end - plan.start
            seconds = ended - self._began_at
            self._context.stats.record("load", nbytes, seconds, tokens=num_tokens, trace_id=trace_id)

    def _record(self, ended: float, reason: str) -> str:
        """Record the spans of the load, of its parts, and of the arrival of groups of layers. Return the id
        of the trace."""
        plan, request_id, spans = self.plan, self.request_id, self._context.spans
        load = spans.record(
            "load",
            request_id,
            self._began_at,
            ended,
            parent=plan.traceparent,
            reason=reason,
            num_tokens=plan.end - plan.start,
            in_background=plan.in_background,
        )
        for part in self.parts:
            if part.job is None:
                continue
            missed = self._missed_in(part)
            get = spans.record(
                "get",
                request_id,
                part.begun_at,
                part.ended_at or None,
                parent=load,
                reason="" if missed is None else missed[1],
                source=part.source,
                route=part.route,
                num_pages=part.count,
                verify_seconds=part.job.verify_seconds,
            )
            arrivals, num_layers = part.job.arrivals, part.job.num_layers_ready
            if missed is None and num_layers > (arrivals[-1][0] if arrivals else 0):
                arrivals = [*arrivals, (num_layers, part.ended_at)]  # the last ones came with the end
            spans.record_layers(request_id, part.begun_at, arrivals, get, is_verified=part.is_verified)
        return load.trace_id

    def _token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return sum(view.element_size() * view[0, 0].numel() for view in self._views[0])

    def _missed_in(self, part: Part) -> tuple[int, str] | None:
        """The number of the first missed page of the part, and the reason; ``None`` if all were loaded."""
        results = None if part.job is None else part.job.results()
        if results is None:
            error = part.error or self.error
            return 0, "other" if error is None else reason_of(error)
        for at, missed in enumerate(results):
            if missed is not None:
                if missed is MissReason.CANCELLED and isinstance(self.error, TimeoutError):
                    return at, reason_of(self.error)
                return at, str(missed)
        return None

    def unreadable(self) -> Iterator[tuple[str, bytes]]:
        """The source and the chain of each page that exists but cannot be read."""
        for part in self.parts:
            for at, missed in enumerate((part.job and part.job.results()) or ()):
                if missed in _LASTING:
                    yield part.source, self._chains[part.first + at]

    @property
    def block_ids(self) -> frozenset[int]:
        """Every block that it writes into."""
        return self._groups.written(self.plan.block_ids, self.plan.start, self.plan.end)

    @property
    def failed_block_ids(self) -> frozenset[int]:
        """Blocks that lack the KV of some token in some layer."""
        first = max(self.plan.start, (self.plan.first_page + self._first_missed) * self._page_tokens)
        return self._groups.written(self.plan.block_ids, first, self.plan.end)
