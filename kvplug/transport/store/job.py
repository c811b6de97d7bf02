"""A request to a store, and its results."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvplug.errors import TimeoutError
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.threads import ExitGuard
from kvplug.transport.store.results import MissReason

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Job(Generic[T]):
    """A request to a store: one result for each key, in the order of the keys.

    Law. It always ends, by its deadline, even if the store's process is stopped or killed. A failure of the
    store is a result (a miss with its reason), never an exception.

    A job that has ended is *done*: its results are final. It is *settled* when the store no longer touches
    the caller's memory. With most stores both happen at the same moment. If a deadline cannot stop a copy
    that is under way, since another process, a device or a library performs it, the job is done first and
    settled later, and the caller must not reuse the memory in between. A caller that cannot wait until then
    calls :meth:`take_back`. A put may settle before it is done.

    Thread-safe. The store calls :meth:`set` and :meth:`settle`; callers use the other methods.
    """

    __slots__ = (
        "_callbacks",
        "_changed",
        "_lock",
        "_on_cancel",
        "_on_take_back",
        "_results",
        "_settled",
        "_settled_callbacks",
        "count",
        "deadline",
        "failure",
    )

    def __init__(self, count: int, deadline: Deadline) -> None:
        self.count = count
        """Number of keys."""
        self.deadline = deadline
        """When the store stops waiting for the pages that have not arrived."""
        self.failure: MissReason | None = None
        """Why the job ended before every key had a result; a lookup's results do not say so. Set by the
        store."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._results: list[T] | None = None
        self._settled = False
        self._callbacks: list[Callable[[Job[T]], None]] = []
        self._settled_callbacks: list[Callable[[Job[T]], None]] = []
        self._on_cancel: Callable[[], object] | None = None
        self._on_take_back: Callable[[], object] | None = None

    def __repr__(self) -> str:
        state = "under way" if self._results is None else "done" if self._settled else "done, not settled"
        return f"<{type(self).__name__} for {self.count} pages, {state}>"

    # -- for callers ---------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the results are final."""
        return self._results is not None

    @property
    def settled(self) -> bool:
        """Whether the store has stopped using the caller's memory."""
        return self._settled

    def wait(self, timeout: Timeout = None) -> list[T]:
        """Wait until the job is done, and return the results.

        Raises:
            TimeoutError: the job is still under way, and continues.
        """
        with self._lock:
            self._changed.wait_for(lambda: self.done, Deadline.after(timeout).remaining())
            results = self._results
        if results is None:
            raise TimeoutError(f"a request to a store for {self.count} pages is still under way")
        ExitGuard.hold()  # at exit kvplug ends the job; this thread must not return to the program
        return results

    def wait_settled(self, timeout: Timeout = None) -> bool:
        """Wait until the job is settled. Returns whether it settled in time."""
        with self._lock:
            return self._changed.wait_for(lambda: self._settled, Deadline.after(timeout).remaining())

    def results(self) -> list[T] | None:
        """Return the results, or ``None`` while the job is under way."""
        return self._results

    def cancel(self) -> None:
        """Make the job end soon, with the results so far. Idempotent; never blocks for long."""
        with self._lock:
            cancel = None if self._results is not None else self._on_cancel
        if cancel is not None:
            cancel()

    def take_back(self, timeout: Timeout = None) -> bool:
        """Give up the pages that the store has not begun to copy. Returns whether the calling thread may now
        reuse the memory. Device work that this thread queues from then on runs after the store's copies."""
        if self._settled:
            return True
        if self._on_take_back is None:
            self.cancel()
            return self.wait_settled(timeout)
        self._on_take_back()
        return True

    def add_done_callback(self, callback: Callable[[Job[T]], None]) -> None:
        """Call ``callback(self)`` when the job is done: at once if it is, else in the thread that ends it.

        The callback must not block.
        """
        self._add(callback, self._callbacks)

    def add_settled_callback(self, callback: Callable[[Job[T]], None]) -> None:
        """Like :meth:`add_done_callback`, but for the moment when the job is both done and settled."""
        self._add(callback, self._settled_callbacks)

    def _add(self, callback: Callable[[Job[T]], None], callbacks: list[Callable[[Job[T]], None]]) -> None:
        with self._lock:
            callbacks.append(callback)
        self._call_back()

    def _call_back(self) -> None:
        """Call the callbacks that are due."""
        due: list[Callable[[Job[T]], None]] = []
        with self._lock:
            if self._results is not None:
                for callbacks in (self._callbacks, *([self._settled_callbacks] if self._settled else [])):
                    due += callbacks
                    callbacks.clear()
        for callback in due:
            try:
                callback(self)
            except Exception:  # the store's thread must live on
                _log.exception("a callback of %r failed", self)

    # -- for stores ----------------------------------------------------------------------------

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        """Set the function that :meth:`cancel` calls, in the caller's thread, while the job is under way."""
        self._on_cancel = cancel

    def on_take_back(self, take_back: Callable[[], object]) -> None:
        """Set the function that :meth:`take_back` calls, in the caller's thread, instead of cancelling the
        job and waiting until it is settled. It must not block."""
        self._on_take_back = take_back

    def set(self, results: Sequence[T], *, settled: bool = True) -> bool:
        """End the job with these results. Returns whether this call ended it; only the first call does."""
        if len(results) != self.count:
            raise ValueError(f"{len(results)} results for {self.count} keys")
        with self._lock:
            if self._results is not None:
                return False
            self._results = list(results)
            self._settled = self._settled or settled
            self._on_cancel = None
            self._notify()
        self._call_back()
        return True

    def _notify(self) -> None:
        """With the lock: wake the threads that wait for the end."""
        self._changed.notify_all()

    def settle(self) -> None:
        """Note that the store has stopped using the caller's memory."""
        with self._lock:
            self._settled = True
            self._changed.notify_all()
        self._call_back()

    def after_fork(self, results: Sequence[T]) -> None:
        """For stores, in a forked child: end the request, which belongs to the parent, with these results.

        Takes no lock made before the fork, and does not call the parent's callbacks.
        """
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._callbacks, self._settled_callbacks = [], []
        self._on_cancel = self._on_take_back = None
        if self._results is None:
            self._results = list(results)
        self._settled = True


class GetJob(Job[MissReason | None]):
    """A request for pages, which may become usable layer by layer.

    The first :attr:`num_layers_ready` layers of every page that was not missed are verified and in the
    caller's memory.
    """

    __slots__ = ("_advanced", "_num_layers", "_progressed_at", "_ready", "arrivals", "verify_seconds")

    def __init__(self, count: int, num_layers: int, deadline: Deadline) -> None:
        super().__init__(count, deadline)
        self._num_layers = num_layers
        self._ready = 0
        self._progressed_at = 0.0
        self.arrivals: list[tuple[int, float]] = []
        """Each time that more layers became ready, by ``time.monotonic``, with their number from then on."""
        self.verify_seconds = 0.0
        """For stores: time spent on comparing bytes with checksums once they were in the caller's memory; 0:
        they were compared while they were copied, or not at all."""
        self._advanced = threading.Condition(self._lock)
        """Separate from ``_changed``, so that a layer does not wake threads that wait for the end."""

    @property
    def num_layers_ready(self) -> int:
        """Number of layers that may be used; all of them once the job is done."""
        return self._num_layers if self.done else self._ready

    def wait_for_layer(self, layer: int, timeout: Timeout = None) -> None:
        """Wait until the layer may be used, or the job is done.

        Raises:
            TimeoutError: neither happened in time.
        """
        with self._lock:
            left = Deadline.after(timeout).remaining()
            if not self._advanced.wait_for(lambda: self.num_layers_ready > layer or self.done, left):
                raise TimeoutError(f"layer {layer} of {self.count} pages did not arrive in time")
        ExitGuard.hold()

    @property
    def progressed_at(self) -> float:
        """When data last arrived, by ``time.monotonic``; 0 if none has."""
        return self._progressed_at

    def advance(self, num_layers: int = 0) -> None:
        """For stores: note that data has arrived, and that the first ``num_layers`` layers may be used."""
        with self._lock:
            self._progressed_at = time.monotonic()
            if num_layers > self._ready:
                self._ready = num_layers
                self.arrivals.append((num_layers, self._progressed_at))
            self._advanced.notify_all()

    def _notify(self) -> None:
        super()._notify()
        self._advanced.notify_all()

    def after_fork(self, results: Sequence[MissReason | None]) -> None:
        super().after_fork(results)
        self._advanced = threading.Condition(self._lock)
