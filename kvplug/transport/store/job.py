"""One request to a store under way."""

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

    Law. It always ends, by its deadline, also when the store's process is stopped or killed. A failure of the
    store is a result (a miss with its reason), never an exception.

    A job that has ended is *done*: its results are final. It is *settled* when the store touches the caller's
    memory no more, which is the same moment for most stores. Where a deadline cannot stop a copy that is
    under way (another process, a device or a library performs it), the job is done first and settled later:
    the memory must not be used again in between. The memory of a put is *reusable* when it is settled, or
    earlier: what the thread that asked does or queues next runs after the store has read it.

    Thread-safe. The store calls :meth:`set` and :meth:`settle`; callers do the rest.
    """

    __slots__ = (
        "_callbacks",
        "_changed",
        "_lock",
        "_on_cancel",
        "_results",
        "_reusable",
        "_settled",
        "_watcher",
        "count",
        "deadline",
    )

    def __init__(self, count: int, deadline: Deadline) -> None:
        self.count = count
        """Number of keys."""
        self.deadline = deadline
        """When the store gives up what has not come."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._results: list[T] | None = None
        self._settled = self._reusable = False
        self._callbacks: list[Callable[[Job[T]], None]] = []
        self._on_cancel: Callable[[], object] | None = None
        self._watcher: Callable[[], None] | None = None

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
        """Whether the store touches the caller's memory no more."""
        return self._settled

    @property
    def reusable(self) -> bool:
        """Of a put: whether the thread that asked may use the memory again."""
        return self._reusable or self._settled

    def wait(self, timeout: Timeout = None) -> list[T]:
        """The results, once the job is done.

        Raises:
            TimeoutError: it is still under way. The job goes on.
        """
        with self._lock:
            self._changed.wait_for(lambda: self.done, Deadline.after(timeout).remaining())
            results = self._results
        if results is None:
            raise TimeoutError(f"a request to a store for {self.count} pages is still under way")
        ExitGuard.hold()  # then the store has ended, which the program does not expect
        return results

    def wait_settled(self, timeout: Timeout = None) -> bool:
        """Return whether the job has settled in time."""
        with self._lock:
            return self._changed.wait_for(lambda: self._settled, Deadline.after(timeout).remaining())

    def results(self) -> list[T] | None:
        """The results; ``None`` while the job is under way."""
        return self._results

    def cancel(self) -> None:
        """The caller needs it no more: it ends soon, with what it has. Idempotent; never blocks for long."""
        with self._lock:
            cancel = None if self._results is not None else self._on_cancel
        if cancel is not None:
            cancel()

    def add_done_callback(self, callback: Callable[[Job[T]], None]) -> None:
        """Call ``callback(self)`` once the job is done: at once if it is, else in the thread that ends it.

        The callback must not block.
        """
        with self._lock:
            if self._results is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher()`` whenever the job changes: something has arrived, it is done, or settled. For one
        watcher, which must not block."""
        self._watcher = watcher
        watcher()

    def _tell(self) -> None:
        if self._watcher is not None:
            self._watcher()

    # -- for stores ----------------------------------------------------------------------------

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        """What :meth:`cancel` calls, in the caller's thread, while the job is under way."""
        self._on_cancel = cancel

    def set(self, results: Sequence[T], *, settled: bool = True) -> bool:
        """The job is done. Returns whether it was not before: of two that end it, the first wins."""
        if len(results) != self.count:
            raise ValueError(f"{len(results)} results for {self.count} keys")
        with self._lock:
            if self._results is not None:
                return False
            self._results = list(results)
            self._settled = self._settled or settled
            callbacks, self._callbacks = self._callbacks, []
            self._on_cancel = None
            self._notify()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # it runs in a store's thread, which others depend on
                _log.exception("a callback of %r failed", self)
        self._tell()
        return True

    def _notify(self) -> None:
        """With the lock: wake what waits for the end."""
        self._changed.notify_all()

    def allow_reuse(self) -> None:
        """What the thread that asked queues from now on for its memory's device runs after the store has read
        it."""
        self._reusable = True

    def settle(self) -> None:
        """The store touches the caller's memory no more."""
        with self._lock:
            self._settled = True
            self._changed.notify_all()
        self._tell()

    def after_fork(self, results: Sequence[T]) -> None:
        """For stores, in a forked child: the request is the parent's, and ends here with these results.

        Takes no lock made before the fork. The callbacks are the parent's and are not called here.
        """
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._callbacks = []
        self._on_cancel = self._watcher = None
        if self._results is None:
            self._results = list(results)
        self._settled = True


class GetJob(Job[MissReason | None]):
    """A request for pages, which may become usable layer by layer.

    The pages' layers before :attr:`num_layers_ready` are in the caller's memory, and verified, for every page
    that was not missed.
    """

    __slots__ = ("_advanced", "_num_layers", "_progressed_at", "_ready")

    def __init__(self, count: int, num_layers: int, deadline: Deadline) -> None:
        super().__init__(count, deadline)
        self._num_layers = num_layers
        self._ready = 0
        self._progressed_at = 0.0
        self._advanced = threading.Condition(self._lock)
        """Apart from what waits for the end, which is not woken by each layer."""

    @property
    def num_layers_ready(self) -> int:
        """Layers that may be used; all of them once the job is done."""
        return self._num_layers if self.done else self._ready

    def wait_for_layer(self, layer: int, timeout: Timeout = None) -> None:
        """Return when the layer may be used, or the job is done.

        Raises:
            TimeoutError: neither came in time.
        """
        with self._lock:
            left = Deadline.after(timeout).remaining()
            if not self._advanced.wait_for(lambda: self.num_layers_ready > layer or self.done, left):
                raise TimeoutError(f"layer {layer} of {self.count} pages did not come in time")
        ExitGuard.hold()

    @property
    def progressed_at(self) -> float:
        """When something arrived last, by ``time.monotonic``; 0: nothing yet."""
        return self._progressed_at

    def advance(self, num_layers: int = 0) -> None:
        """For stores: something more has arrived, and so many layers may be used now."""
        with self._lock:
            self._ready = max(self._ready, num_layers)
            self._progressed_at = time.monotonic()
            self._advanced.notify_all()
        self._tell()

    def _notify(self) -> None:
        super()._notify()
        self._advanced.notify_all()

    def after_fork(self, results: Sequence[MissReason | None]) -> None:
        super().after_fork(results)
        self._advanced = threading.Condition(self._lock)
