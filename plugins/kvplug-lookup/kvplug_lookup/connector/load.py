"""Fetching one prompt's KV from a lookup buffer and scattering it, layer by layer."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplug import ClosedError, IntegrityError, TimeoutError
from kvplug.engine import KVLayout, StalledError, TransferStats, reason_of, scatter
from kvplug.transport import BackgroundThread, Deadline, EntryHeader, LookupBuffer, exhaustion_of
from kvplug_lookup.connector.device import Mark, wait_for_device
from kvplug_lookup.connector.plan import LoadPlan
from kvplug_lookup.connector.save import hash_of
from kvplug_lookup.connector.stall import StallClock

if TYPE_CHECKING:
    from torch import Tensor


class Load:
    """One load under way: an ``EntrySink`` that verifies and scatters each layer as it arrives.

    Once it has failed, for whatever reason, it never touches a block again: the check and the scatter
    happen under one lock, so that blocks may be recomputed, or reused, as soon as the failure is known.

    It fails at the latest when it has stalled: a thread that waits for it, or asks whether it has ended,
    notices that, whatever the thread that loads is waiting for.

    Args:
        free: behind what the engine has still queued for the blocks; nothing is written before.
        stall: of the connection that it comes over.
    """

    def __init__(
        self,
        plan: LoadPlan,
        layout: KVLayout,
        caches: tuple[Tensor, ...],
        *,
        free: Mark,
        stall: StallClock,
        checksum: Callable[[], str | None],
        stats: TransferStats,
    ) -> None:
        self.plan = plan
        self._free = free
        self._stall = stall
        self._stats = stats
        self._started = time.perf_counter()
        self.submitted = time.monotonic()
        self._layout = layout
        self._caches = caches
        self._checksum = checksum
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._num_layers_done = 0
        self._error: BaseException | None = None
        self._hashes: list[bytes] | None = None
        self._hash_name = ""
        self._nbytes = 0

    # -- the sink ------------------------------------------------------------------------------

    def begin(self, header: EntryHeader) -> None:
        with self._stall.working():
            self._begin(header)

    def _begin(self, header: EntryHeader) -> None:
        if self._error is not None:
            raise self._error
        if header.num_layers != len(self._caches):
            raise IntegrityError(
                f"entry {header.entry_id} has {header.num_layers} layers, and this cache {len(self._caches)}"
            )
        # Whatever the buffer found it by: a token's KV is used for that very token at that position only.
        end = self.plan.end
        if header.tokens[:end].tolist() != list(self.plan.token_ids) or not bool(header.roi[:end].all()):
            raise IntegrityError(
                f"entry {header.entry_id} is not the KV of the {end} tokens that were promised to request"
                f" {self.plan.request_id}"
            )
        wanted = self._checksum()
        self._hash_name = header.metadata.get("checksum", "")
        self._hashes = None
        if wanted is not None:
            hashes = header.metadata.get("layers")
            if (
                self._hash_name != wanted
                or not isinstance(hashes, list)
                or len(hashes) != header.num_layers
                or not all(isinstance(each, bytes) for each in hashes)
            ):
                raise IntegrityError(
                    f"entry {header.entry_id} carries no {wanted} hashes of its layers, which both ends"
                    " agreed on"
                )
            self._hashes = hashes

    def layer(self, index: int, key: Tensor | None, value: Tensor | None) -> None:
        with self._stall.working():
            self._layer(index, key, value)

    def _layer(self, index: int, key: Tensor | None, value: Tensor | None) -> None:
        if key is None:
            raise IntegrityError(f"layer {index} of the entry has no keys")
        plan = self.plan
        for part in (key, value):
            if part is not None and part.shape[0] < plan.end:
                raise IntegrityError(
                    f"layer {index} of the entry has {part.shape[0]} tokens, and {plan.end} were promised to"
                    f" request {plan.request_id}"
                )
        if self._hashes is not None and hash_of(self._hash_name, key, value) != self._hashes[index]:
            raise IntegrityError(
                f"layer {index} of the KV of request {plan.request_id} does not hash to what its"
                f" producer stated ({self._hash_name}): it is not used"
            )
        key = key[plan.start : plan.end]
        value = None if value is None else value[plan.start : plan.end]
        self._free.wait()  # outside the lock: meanwhile it can be failed
        with self._lock:
            if self._error is not None:
                raise self._error
            scatter(self._caches[index], self._layout, plan.block_ids, plan.start, key, value)
            wait_for_device(self._caches[index])
            self._nbytes += key.nbytes + (0 if value is None else value.nbytes)
            self._num_layers_done = index + 1
            if self._is_done():
                seconds = time.perf_counter() - self._started
                self._stats.record("load", self._nbytes, seconds, tokens=plan.end - plan.start)
            self._changed.notify_all()

    # -- the waiters ---------------------------------------------------------------------------

    def wait_for_layer(self, index: int, deadline: Deadline) -> None:
        """Return when the layer is in the cache or the load has failed; at the deadline, or when nothing
        comes, it has failed.
        """
        with self._lock:
            while self._num_layers_done <= index and self._error is None:
                stalled = self._stalled
                if deadline.expired:
                    self._fail(
                        TimeoutError(f"layer {index} of request {self.plan.request_id} did not come in time")
                    )
                elif stalled.expired:
                    self._fail_as_stalled()
                else:
                    self._changed.wait(Deadline(min(deadline.at, stalled.at)).remaining())

    def fail(self, error: BaseException) -> None:
        """Nothing is written any more when this returns; it waits for a layer that is being written."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._error is None and not self._is_done():
            self._error = error
            self._stats.fail("load", reason_of(error))
            self._changed.notify_all()

    @property
    def _stalled(self) -> Deadline:
        return self._stall.deadline(self.submitted)

    def _fail_as_stalled(self) -> None:
        self._fail(
            StalledError(
                f"nothing came for {self._stall.timeout_s:g} s (stall_timeout_s): the peer engine's worker is"
                " stopped, or too slow"
            )
        )

    def _is_done(self) -> bool:
        return self._num_layers_done == len(self._caches)

    @property
    def error(self) -> BaseException | None:
        return self._error

    def has_ended(self) -> bool:
        """Whether it is done, or has failed, at the latest by a stall. Never waits."""
        # The lock is held while a layer is written, which is no stall.
        if self._stalled.expired and self._lock.acquire(blocking=False):
            try:
                if self._stalled.expired:  # a layer may have come before the lock was taken
                    self._fail_as_stalled()
            finally:
                self._lock.release()
        return self._error is not None or self._is_done()

    @property
    def block_ids(self) -> frozenset[int]:
        """Every block it is to write. If it fails, none of them is known to be whole in all layers."""
        block_size = self._layout.block_size
        first = self.plan.start // block_size
        return frozenset(self.plan.block_ids[first:])


class Loader:
    """Runs loads one after the other in its own thread, each over the buffer that serves it then.

    A load's time begins when it is submitted, or when the one before it succeeded, if that is later: so a
    long queue is worked off as long as something comes, and behind a store that does not answer all fail
    at once instead of one timeout after the other.
    """

    def __init__(
        self, buffer: Callable[[Deadline], LookupBuffer], *, timeout_s: float, stall_timeout_s: float
    ) -> None:
        self.stall = StallClock(stall_timeout_s)
        """For the loads that are submitted."""
        self._buffer = buffer
        self._timeout_s = timeout_s
        self._last_success = -math.inf
        self._queue: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = BackgroundThread(self._run, name="kvplug-lookup-load", stop=self._stop)
        self._thread.start()

    def submit(self, load: Load) -> None:
        if self._closed:
            load.fail(ClosedError("the connector was shut down"))
        self._queue.put(load)

    def close(self) -> None:
        self._stop()
        self._thread.join(timeout=5)

    def _stop(self) -> None:
        self._closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            if self._closed:
                load.fail(ClosedError("the connector was shut down"))
            elif load.error is None:
                self._run_one(load)

    def _run_one(self, load: Load) -> None:
        plan = load.plan
        deadline = Deadline(max(load.submitted, self._last_success) + self._timeout_s)
        try:
            if deadline.expired:
                raise TimeoutError("the loads before it took all the time")
            buffer = self._buffer(deadline)
            if load.error is not None:
                return  # it has stalled while the peer was dialled
            buffer.select(
                plan.token_ids,
                extra=plan.extra,
                min_tokens=plan.end,
                sink=load,
                timeout=deadline.remaining(),
            )
            self._last_success = time.monotonic()
        except Exception as e:
            load.fail(exhaustion_of(e, "loading") or e)
        else:
            load.fail(IntegrityError("the entry ended before its last layer"))  # nothing where it is whole
