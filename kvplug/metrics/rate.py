"""Detects pipes and stores that are far slower than their transport claims or than they were before.

Only a pipe's sends are measured, by the sending end: a receive also waits until the peer has something to
send. Delays that are not the path's fault are left out where they can be detected: waiting behind earlier
messages of the same pipe, concurrent transfers of this process, and a host with more runnable threads than
processors. One fast batch clears a suspected path.

A store claims no rate. Its caches, its load and the number of concurrent requests can change its rate
severalfold. So it is compared with the best rate that it has sustained, and counts as slow only below a
twentieth of it. The rates of puts and of disks are capped, because they can look too fast: a put of pages
that the store holds moves nothing, and a disk's pages may come from the page cache.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import attrs

from kvplug.transport.capabilities import Capabilities

CLAIM_FACTOR: Final = 10
"""A path is slow if it takes this many times as long as its transport claims."""
HISTORY_FACTOR: Final = 5
"""A pipe is slow if it takes this many times as long as its earlier median."""
STORE_FACTOR: Final = 20
"""A store is slow if it takes this many times as long as before."""
REFUSED_S: Final = 60.0
"""A refused store is tried again after this time."""

_LEAST_BYTES: Final = 1 << 20
"""Smaller messages are not measured, because their time depends more on latency than on the path."""
_BATCH_BYTES: Final = 8 << 20
"""Transfers are judged in batches of this size, so that bytes buffered by a socket do not count as fast."""
_BATCH_S: Final = 0.25
"""A batch also ends after this time, on a very slow path."""
_SLOW_BATCHES: Final = 8
_SLOW_S: Final = 3.0
"""An alarm needs this many slow batches in a row, taking at least this many seconds in all. Time between
batches does not count: a few messages an hour, each some milliseconds late, deserve no warning."""
_HISTORY: Final = 16
"""A path is compared with the median of this many batches that were not slow."""
_MOST_LOAD: Final = 16.0
"""The host's load, in runnable threads per processor, excuses slowness only up to this value."""
_MOST_PUT_GB_PER_S: Final = 2.0
_MOST_DISK_GB_PER_S: Final = 1.0
"""The highest rates that the history of puts and of disks records."""
_MOST_RATES: Final = 32
"""The most pairs of operation and page size that are measured. A process has one page size for each group of
layers of its models."""
_NOT_MEASURED: Final = frozenset({"cancelled", "closed", "store_gone"})
"""A request with such a result ended early, so its time is meaningless."""
_WORDS: Final = {
    HISTORY_FACTOR: ("a fifth", "it carried before"),
    CLAIM_FACTOR: ("a tenth", "its transport claims"),
    STORE_FACTOR: ("a twentieth", "it carried before"),
}
_LOAD: Final = Path("/proc/loadavg")
_TASKS: Final = Path("/proc/self/task")

StoreOp = Literal["get", "put"]


@attrs.frozen(kw_only=True)
class SlowRate:
    """The measured rate of a slow path, and the expected rate. Rates are in 10^9 bytes per second."""

    gb_per_s: float
    expected_gb_per_s: float
    """The claimed rate, or the path's earlier rate."""
    factor: int = CLAIM_FACTOR
    """How many times slower than expected counts as slow; ``CLAIM_FACTOR`` if the claim was expected."""
    nbytes: int = 0
    seconds: float = 0.0
    """Time of the measured transfers; 0 if the transport measured the rate when the pipe opened."""

    def __str__(self) -> str:
        moved = f"{self.nbytes >> 20} MiB in {self.seconds:.3g} s" if self.nbytes else "at its start"
        share, source = _WORDS[self.factor]
        return (
            f"carries {self.gb_per_s:.3g} GB/s ({moved}), less than {share} of the"
            f" {self.expected_gb_per_s:.3g} GB/s that {source}"
        )


@attrs.define(eq=False)
class _Moved:
    """Totals of one batch of transfers, or of several slow batches in a row."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    excess: tuple[float, float] = (float("inf"), float("inf"))
    """The best batch's time, as multiples of the limits that the claim and the history set."""

    def add(self, nbytes: int, seconds: float) -> None:
        self.count += 1
        self.nbytes += nbytes
        self.seconds += seconds


class Rate:
    """Measures the transfer rate over one path. Thread-safe; its memory does not grow with use."""

    def __init__(
        self,
        claim: Capabilities.Cost | None = None,
        *,
        factor: int = HISTORY_FACTOR,
        keeps_best: bool = False,
        most_gb_per_s: float = float("inf"),
        on_known: Callable[[Rate], object] = lambda rate: None,
    ) -> None:
        """
        Args:
            claim: the transport's claim; ``None``: only the history counts.
            factor: how many times slower than its history a path must be to count as slow.
            keeps_best: compare with the best median so far instead of the latest.
            most_gb_per_s: higher rates count as this rate in the history.
            on_known: called with this object after each new usual rate and each alarm.
        """
        self._claim = claim
        self._on_known = on_known
        self._factor = factor
        self._keeps_best = keeps_best
        self._most = most_gb_per_s
        self._lock = threading.Lock()
        self._batch, self._slow = _Moved(), _Moved()
        self._usual: dict[int, float] = {}
        """The median rate of batches that were not slow, by the batch's mean message size in powers of four.
        Sizes are separate because small messages are slower where each message adds latency."""
        self._newer: dict[int, list[float]] = {}
        """The rates since the usual rate was last set, by the same sizes."""
        self._alarmed = False
        self.latest_gb_per_s: float | None = None
        """The rate of the latest batch; ``None`` before the first."""

    @property
    def claimed_gb_per_s(self) -> float | None:
        """The rate that the transport claims, if it claims one."""
        return None if self._claim is None else self._claim.gb_per_s

    def add(self, nbytes: int, seconds: float) -> SlowRate | None:
        """Add a transfer. ``seconds``: the time that it would have taken alone. Returns a slow rate to warn
        of, or ``None``."""
        with self._lock:
            batch = self._batch
            batch.add(nbytes, seconds)
            if batch.nbytes < _BATCH_BYTES and batch.seconds < _BATCH_S:
                return None
            self._batch = _Moved()
            return self._judge(batch)

    def is_first_alarm(self) -> bool:
        """Return true on the first call only, because each path gets one warning."""
        with self._lock:
            first, self._alarmed = not self._alarmed, True
        self._on_known(self)
        return first

    def _judge(self, batch: _Moved) -> SlowRate | None:
        seconds, size = max(batch.seconds, 1e-9), batch.nbytes // batch.count
        rate, order = batch.nbytes / 1e9 / seconds, size.bit_length() // 2
        self.latest_gb_per_s = rate
        usual = self._usual.get(order, 0.0)
        claimed_s = batch.count * self._claim.seconds(size) if self._claim is not None else float("inf")
        excess = seconds / claimed_s / CLAIM_FACTOR, usual / rate / self._factor
        if max(excess) <= 1:
            self._note(order, min(rate, self._most))
            self._slow = _Moved()
            return None
        slow = self._slow
        slow.add(batch.nbytes, seconds)
        slow.excess = min(slow.excess[0], excess[0]), min(slow.excess[1], excess[1])
        if slow.count < _SLOW_BATCHES or slow.seconds < _SLOW_S:
            return None
        self._slow = _Moved()
        # Even the best batch must be slower than the host's load excuses. The load is squared, since a busy
        # host keeps both ends waiting and each piece of a message waits for both.
        excuse = min(max(1.0, host_load()), _MOST_LOAD) ** 2
        if self._claim is not None and slow.excess[0] > excuse:
            expected, factor = self._claim.gb_per_s, CLAIM_FACTOR
        elif slow.excess[1] > excuse:
            expected, factor = usual, self._factor
        else:
            return None
        return SlowRate(
            gb_per_s=slow.nbytes / 1e9 / slow.seconds,
            expected_gb_per_s=expected,
            factor=factor,
            nbytes=slow.nbytes,
            seconds=slow.seconds,
        )

    def _note(self, order: int, rate: float) -> None:
        newer = self._newer.setdefault(order, [])
        newer.append(rate)
        if len(newer) >= _HISTORY:
            best = self._usual.get(order, 0.0) if self._keeps_best else 0.0
            self._usual[order] = max(best, statistics.median(newer))
            newer.clear()
            self._on_known(self)


class SharedTime:
    """Time divided among concurrent users: while there are ``n``, it passes ``n`` times more slowly. Over
    one use, it advances by the time that the use would have taken alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may abort a pipe
        self._users = 0
        self._until = self._time = 0.0

    def at(self, now: float, users: int = 0) -> float:
        """Return the shared time at ``now``, and change the number of users by ``users`` from then on."""
        with self._lock:
            if now > self._until:
                if self._users:
                    self._time += (now - self._until) / self._users
                self._until = now
            self._users += users
            return self._time


_sending = SharedTime()
"""Shared by the pipes of this process that are sending large messages."""
os.register_at_fork(after_in_child=_sending.__init__)  # type: ignore[misc]


class LargeSend(NamedTuple):
    """A measured send in progress."""

    began: float
    shared: float
    """The shared time when it began."""


Sending = LargeSend | float
"""A send in progress; for a send that is not measured, only its start time."""


class PathWatch:
    """Measures the large sends of one pipe, and keeps an alarm until the next call on the pipe.

    ``alarm(found)`` is called in the thread of that call, not in the transport's threads, because it may take
    a moment. It returns the error that every call raises from then on, or ``None``.
    """

    def __init__(self, rate: Rate, alarm: Callable[[SlowRate], Exception | None]) -> None:
        self.rate = rate
        """The rate of the pipe's path, which other pipes may share."""
        self._alarm = alarm
        self._lock = threading.RLock()
        self._large: deque[LargeSend] = deque()
        """The large sends in progress."""
        self._ended = 0.0
        """When the latest message ended. Messages sent after a large one still in progress do not count."""
        self._found: SlowRate | None = None
        self._refusal: Exception | None = None
        self.due = False
        """Whether an alarm is due, or the pipe is refused."""

    def __del__(self) -> None:
        if self._large:
            _sending.at(time.perf_counter(), -1)

    def begin(self, nbytes: int, now: float) -> Sending:
        """Note that a message is about to be sent."""
        if nbytes < _LEAST_BYTES:
            return now
        with self._lock:
            sending = LargeSend(now, _sending.at(now, 0 if self._large else 1))
            self._large.append(sending)
            return sending

    def end(self, sending: Sending, nbytes: int, now: float) -> None:
        """Note that the send has succeeded, or, if ``nbytes`` is 0, failed."""
        if isinstance(sending, float):
            if self._large:
                with self._lock:
                    if self._large and self._large[0].began < sending:
                        return
            if now > self._ended:
                self._ended = now
            return
        with self._lock:
            self._large.remove(sending)
            shared = _sending.at(now, 0 if self._large else -1) - sending.shared
            alone_since, self._ended = max(sending.began, self._ended), max(now, self._ended)
        if not nbytes:
            return
        took = max(now - sending.began, 1e-9)
        found = self.rate.add(nbytes, max(0.0, now - alone_since) * min(1.0, shared / took))
        if found is not None:
            self._found = found
            self.due = True

    def take_alarm(self) -> Exception | None:
        """Report the alarm that is due. Returns the error with which the pipe is refused, or ``None``."""
        self.due = False  # first, so that the next call reports an alarm found meanwhile
        found, self._found = self._found, None
        if found is not None and (refusal := self._alarm(found)) is not None:
            self._refusal = refusal
        self.due = self.due or self._refusal is not None
        return self._refusal

    def close(self) -> None:
        """Report the alarm that is due when the pipe closes. A signal handler must not call this."""
        if self._found is not None:
            self.take_alarm()


@attrs.define(eq=False)
class _Direction:
    found: SlowRate | None = None
    alarmed: bool = False
    refused_until: float = float("-inf")


class StoreWatch:
    """Measures the gets and puts of one opened store, and keeps an alarm until the next request.

    ``alarm(op, found)`` is called once for each direction, in a thread of the store's user, because requests
    end in the store's threads. Thread-safe; its memory does not grow with use.
    """

    def __init__(self, medium: str, alarm: Callable[[StoreOp, SlowRate], None], *, refuses: bool) -> None:
        """
        Args:
            medium: the store's medium (see ``Store.medium``).
            refuses: whether to refuse a slow direction for :data:`REFUSED_S`.
        """
        self._disk = medium == "disk"
        self._alarm = alarm
        self._refuses = refuses
        self._lock = threading.Lock()
        self._shared = SharedTime()
        self._rates: dict[tuple[StoreOp, int], Rate] = {}
        self._directions: dict[StoreOp, _Direction] = {"get": _Direction(), "put": _Direction()}

    def begin(self, now: float) -> float:
        """Note that a request is about to be made. Returns the shared time, which :meth:`end` needs."""
        return self._shared.at(now, 1)

    def end(self, op: StoreOp, shared: float, now: float, page_nbytes: int, results: Sequence[Any]) -> None:
        """Note that a request has ended with these results."""
        seconds = self._shared.at(now, -1) - shared
        kept = results.count(None)
        nbytes = page_nbytes * kept
        if nbytes < _LEAST_BYTES or (kept < len(results) and not _NOT_MEASURED.isdisjoint(results)):
            return
        rate = self._rates.get((op, page_nbytes)) or self._new_rate(op, page_nbytes)
        found = None if rate is None else rate.add(nbytes, seconds)
        if found is not None:
            self._directions[op].found = found

    def _new_rate(self, op: StoreOp, page_nbytes: int) -> Rate | None:
        most = float("inf") if op == "get" else _MOST_PUT_GB_PER_S
        if self._disk:
            most = min(most, _MOST_DISK_GB_PER_S)
        with self._lock:
            if len(self._rates) >= _MOST_RATES:
                return None
            made = Rate(factor=STORE_FACTOR, keeps_best=True, most_gb_per_s=most)
            return self._rates.setdefault((op, page_nbytes), made)

    def is_refused(self, op: StoreOp) -> bool:
        """Whether requests in this direction are refused now. Reports an alarm that is due."""
        direction = self._directions[op]
        if direction.found is not None:
            with self._lock:
                found, direction.found = direction.found, None
                is_first = found is not None and not direction.alarmed
                direction.alarmed = direction.alarmed or is_first
            if found is not None and self._refuses:
                direction.refused_until = time.monotonic() + REFUSED_S
            if found is not None and is_first:
                self._alarm(op, found)
        return time.monotonic() < direction.refused_until

    def close(self) -> None:
        """Report the alarms that are due when the store closes."""
        self.is_refused("get")
        self.is_refused("put")


def host_load() -> float:
    """Return the number of runnable threads per processor on this host. If this process may use only some of
    the processors, return the number of its own threads per usable processor if that is higher."""
    host, ours = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    try:
        average, _, _, threads, _ = _LOAD.read_text(encoding="ascii").split()
        runnable = max(float(average), int(threads.partition("/")[0]) - 1)
    except (OSError, ValueError):
        return 1.0
    # The host's threads, divided by a pinned process's few processors, would excuse any slowness.
    return max(runnable / host, _num_running() / ours if ours < host else 0.0)


def _num_running() -> int:
    """Count the threads of this process that are running or runnable, except the calling one."""
    running = -1
    try:
        for task in _TASKS.iterdir():
            try:
                running += (task / "stat").read_text().rpartition(") ")[2].startswith("R")
            except OSError:  # the thread has ended
                continue
    except OSError:
        return 0
    return max(0, running)
