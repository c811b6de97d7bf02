"""Whether a pipe or a store carries far less than its transport claims, or than it carried before.

Of a pipe only the sends are measured, by the end that sends: a receive also lasts while the peer has nothing
to send yet. What is not the path's fault is left out as far as it can be seen: waiting behind earlier
messages of the same pipe, other transfers of this process at the same time, and a host with more runnable
threads than processors. One fast batch ends a suspicion.

A store claims no rate, and its caches, its load and the number of requests under way change its rate several
times over. So it is compared with the best that it has kept up, and only a twentieth of that is slow. Two
things make a store look faster than it is, and count for a bounded rate: a put of pages that are held moves
nothing, and a disk's pages come out of the page cache.
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
"""A path is slow that needs this many times as long as its transport claims."""
HISTORY_FACTOR: Final = 5
"""A pipe is slow that needs this many times as long as the median of what it did before."""
STORE_FACTOR: Final = 20
"""A store is slow that needs this many times as long as it did before."""
REFUSED_S: Final = 60.0
"""A store that is refused is tried again after so long."""

_LEAST_BYTES: Final = 1 << 20
"""Smaller messages depend on the latency more than on the path, and are not measured."""
_BATCH_BYTES: Final = 8 << 20
"""Transfers are judged in batches of so much, so that what a socket buffers does not count as fast."""
_BATCH_S: Final = 0.25
"""A batch ends after so much time too: of a very slow path."""
_SLOW_BATCHES: Final = 8
_SLOW_S: Final = 3.0
"""So many batches in a row are slow, and take at least so many seconds, before an alarm. Time between them
does not count: a few messages an hour, each late by some milliseconds, do not deserve a warning."""
_HISTORY: Final = 64
_LEAST_HISTORY: Final = 16
"""Batches that were not slow: the latest ones, and how many it takes to compare with."""
_MOST_LOAD: Final = 16.0
"""A host that is busier than so many threads for each processor is not excused for more."""
_MOST_PUT_GB_PER_S: Final = 2.0
_MOST_DISK_GB_PER_S: Final = 1.0
"""What was faster than this counts as this fast in the history of puts, and of a disk."""
_MOST_RATES: Final = 32
"""Sizes of pages, for gets and puts. A process has as many as its models have groups of layers."""
_NOT_MEASURED: Final = frozenset({"cancelled", "closed", "store_gone"})
"""A request with such a result ended early, so its time says nothing."""
_SHARES: Final = {HISTORY_FACTOR: "a fifth", CLAIM_FACTOR: "a tenth", STORE_FACTOR: "a twentieth"}
_TASKS: Final = Path("/proc/self/task")

StoreOp = Literal["get", "put"]


@attrs.frozen(kw_only=True)
class SlowRate:
    """What was measured of a slow path, and what it was compared with. Rates are in 10^9 bytes per second."""

    gb_per_s: float
    expected_gb_per_s: float
    """The claim; or what the path carried before."""
    factor: int = CLAIM_FACTOR
    """How many times slower than expected is slow."""
    is_claim: bool = True
    """Whether the transport claims what was expected."""
    nbytes: int = 0
    seconds: float = 0.0
    """Of the transfers that were measured; 0: the transport measured it when the pipe began."""

    def __str__(self) -> str:
        moved = f"{self.nbytes >> 20} MiB in {self.seconds:.3g} s" if self.nbytes else "at its start"
        source = "its transport claims" if self.is_claim else "it carried before"
        return (
            f"carries {self.gb_per_s:.3g} GB/s ({moved}), less than {_SHARES[self.factor]} of the"
            f" {self.expected_gb_per_s:.3g} GB/s that {source}"
        )


@attrs.define(eq=False)
class _Usual:
    """The rates of batches that were not slow, of messages of one order of size."""

    rates: deque[float] = attrs.field(factory=lambda: deque(maxlen=_HISTORY))
    since: int = 0
    """How many came after ``gb_per_s`` was computed."""
    gb_per_s: float = 0.0
    """0: there are too few."""

    def note(self, rate: float, *, keeps_best: bool) -> None:
        self.rates.append(rate)
        self.since += 1
        if self.since >= _LEAST_HISTORY:
            median = statistics.median(self.rates)
            self.since, self.gb_per_s = 0, max(self.gb_per_s, median) if keeps_best else median


@attrs.define(eq=False)
class _Batch:
    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@attrs.define(eq=False)
class _Streak:
    """Slow batches in a row. Of the best one: how many times slower it was than it should be."""

    batches: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    of_claim: float = float("inf")
    of_usual: float = float("inf")


class Rate:
    """The rate of the transfers over one path. Thread-safe; its memory does not grow with use."""

    def __init__(
        self,
        claim: Capabilities.Cost | None = None,
        *,
        factor: int = HISTORY_FACTOR,
        keeps_best: bool = False,
        most_gb_per_s: float = float("inf"),
        on_known: Callable[[Rate], object] | None = None,
    ) -> None:
        """
        Args:
            claim: what the transport claims; ``None``: only the history counts.
            factor: how many times slower than its history a path is slow.
            keeps_best: whether the history is the best median there was, not that of the latest batches.
            most_gb_per_s: what was faster counts as this fast in the history.
            on_known: called once with this rate, when :attr:`is_known` becomes true.
        """
        self._claim = claim
        self._factor = factor
        self._keeps_best = keeps_best
        self._most = most_gb_per_s
        self._lock = threading.Lock()
        self._batch, self._streak = _Batch(), _Streak()
        self._usual: dict[int, _Usual] = {}
        """By the mean size of a batch's messages, to a power of four: where each message has a latency of its
        own, small ones are slower, and that is not a fault."""
        self._alarmed = False
        self._on_known = on_known
        self.is_known = False
        """Whether there is something to remember: a batch was judged, or an alarm was given."""

    def _note_known(self) -> None:
        if not self.is_known:
            self.is_known = True
            if self._on_known is not None:
                self._on_known(self)

    def add(self, nbytes: int, seconds: float) -> SlowRate | None:
        """One transfer took ``seconds``, its share of the time in which others were under way as well.
        Returns what to warn of, if anything."""
        with self._lock:
            batch = self._batch
            batch.count += 1
            batch.nbytes += nbytes
            batch.seconds += seconds
            if batch.nbytes < _BATCH_BYTES and batch.seconds < _BATCH_S:
                return None
            self._batch = _Batch()
            return self._judge(batch)

    def is_first_alarm(self) -> bool:
        """Whether this is called for the first time: a path is warned of once."""
        with self._lock:
            first, self._alarmed = not self._alarmed, True
            self._note_known()
            return first

    def _judge(self, batch: _Batch) -> SlowRate | None:
        seconds, size = max(batch.seconds, 1e-9), batch.nbytes // batch.count
        rate = batch.nbytes / 1e9 / seconds
        usual = self._usual.get(order := size.bit_length() // 2)
        if usual is None:
            usual = self._usual[order] = _Usual()
            self._note_known()
        of_claim = seconds / (batch.count * self._claim.seconds(size)) if self._claim else 0.0
        of_usual = usual.gb_per_s / rate
        if of_claim <= CLAIM_FACTOR and of_usual <= self._factor:
            usual.note(min(rate, self._most), keeps_best=self._keeps_best)
            self._streak = _Streak()
            return None
        streak = self._streak
        streak.batches += 1
        streak.nbytes += batch.nbytes
        streak.seconds += seconds
        streak.of_claim = min(streak.of_claim, of_claim)
        streak.of_usual = min(streak.of_usual, of_usual)
        if streak.batches < _SLOW_BATCHES or streak.seconds < _SLOW_S:
            return None
        self._streak = _Streak()
        # The best batch has to be slow on an idle host as well. Squared: a busy host keeps both ends waiting,
        # and each piece of a message waits for both.
        excuse = min(max(1.0, host_load()), _MOST_LOAD) ** 2
        if self._claim is not None and streak.of_claim > CLAIM_FACTOR * excuse:
            expected, factor, is_claim = self._claim.gb_per_s, CLAIM_FACTOR, True
        elif streak.of_usual > self._factor * excuse:
            expected, factor, is_claim = usual.gb_per_s, self._factor, False
        else:
            return None
        return SlowRate(
            gb_per_s=streak.nbytes / 1e9 / streak.seconds,
            expected_gb_per_s=expected,
            factor=factor,
            is_claim=is_claim,
            nbytes=streak.nbytes,
            seconds=streak.seconds,
        )


class SharedTime:
    """Time that is divided among those who use something at the same time: while ``n`` do, it passes ``n``
    times more slowly. What one of them took of it is what it would have taken alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may abort a pipe
        self._users = 0
        self._until = self._time = 0.0

    def at(self, now: float, users: int = 0) -> float:
        """The shared time at ``now``, from when on ``users`` more use it (-1: one fewer)."""
        with self._lock:
            if now > self._until:
                if self._users:
                    self._time += (now - self._until) / self._users
                self._until = now
            self._users += users
            return self._time


_sending = SharedTime()
"""Of the pipes of this process that send large messages."""
os.register_at_fork(after_in_child=_sending.__init__)  # type: ignore[misc]


class LargeSend(NamedTuple):
    """A send that is measured, and under way."""

    number: int
    began: float
    shared: float
    """The shared time when it began."""


Sending = LargeSend | int
"""A send that is under way; of one that is not measured only its number is known."""


class PathWatch:
    """Measures the large sends of one pipe, and keeps an alarm until the next call on the pipe.

    ``alarm(found)`` is called in that call's thread: it may take a moment, and transfers end in threads of
    the transport. It returns the error with which the pipe is refused from then on, or ``None``.
    """

    def __init__(self, rate: Rate, alarm: Callable[[SlowRate], Exception | None]) -> None:
        self._rate = rate
        self._alarm = alarm
        self._lock = threading.RLock()
        self._number = 0
        self._large: deque[int] = deque()
        """The numbers of the large sends that are under way."""
        self._ended = 0.0
        """When the latest message ended that was not sent after a large one that is under way."""
        self._found: SlowRate | None = None
        self._refusal: Exception | None = None
        self.due = False
        """There is an alarm to give, or the pipe is refused."""

    def __del__(self) -> None:
        if self._large:
            _sending.at(time.perf_counter(), -1)

    def begin(self, nbytes: int, now: float) -> Sending:
        """A message is going to be sent."""
        if nbytes < _LEAST_BYTES:
            self._number += 1
            return self._number
        with self._lock:
            self._number += 1
            shared = _sending.at(now, 0 if self._large else 1)
            self._large.append(self._number)
            return LargeSend(self._number, now, shared)

    def end(self, sending: Sending, nbytes: int, now: float) -> None:
        """It has succeeded; with no bytes: it has failed."""
        if isinstance(sending, int):
            if self._large:
                with self._lock:
                    if self._large and self._large[0] < sending:
                        return
            if now > self._ended:
                self._ended = now
            return
        number, began, shared = sending
        with self._lock:
            self._large.remove(number)
            shared = _sending.at(now, 0 if self._large else -1) - shared
            alone_since, self._ended = max(began, self._ended), max(now, self._ended)
        if not nbytes:
            return
        took = max(now - began, 1e-9)
        found = self._rate.add(nbytes, max(0.0, now - alone_since) * min(1.0, shared / took))
        if found is not None:
            with self._lock:
                self._found, self.due = found, True

    def take_alarm(self) -> Exception | None:
        """Give the alarm that is due; returns the error with which the pipe is refused, if it is."""
        with self._lock:
            found, self._found = self._found, None
        refusal = self._alarm(found) if found is not None else None
        with self._lock:
            self._refusal = self._refusal or refusal
            self.due = self._refusal is not None or self._found is not None
            return self._refusal

    def close(self) -> None:
        """The pipe is closed, not in a signal's handler: give the alarm that is due."""
        if self._found is not None:
            self.take_alarm()


@attrs.define(eq=False)
class _Direction:
    found: SlowRate | None = None
    alarmed: bool = False
    refused_until: float = float("-inf")


class StoreWatch:
    """Measures the gets and puts of one opened store, and keeps an alarm until the next request.

    ``alarm(op, found)`` is called once for each direction, in a thread of the store's user; requests end in
    threads of the store. Thread-safe; its memory does not grow with use.
    """

    def __init__(self, medium: str, alarm: Callable[[StoreOp, SlowRate], None], *, refuses: bool) -> None:
        """
        Args:
            medium: the store's (see ``Store.medium``).
            refuses: whether a direction that is slow is not used for :data:`REFUSED_S`.
        """
        self._disk = medium == "disk"
        self._alarm = alarm
        self._refuses = refuses
        self._lock = threading.Lock()
        self._shared = SharedTime()
        self._rates: dict[tuple[StoreOp, int], Rate] = {}
        self._directions: dict[StoreOp, _Direction] = {"get": _Direction(), "put": _Direction()}

    def begin(self, now: float) -> float:
        """A request is going to be made. Returns what :meth:`end` needs."""
        return self._shared.at(now, 1)

    def end(self, op: StoreOp, shared: float, now: float, page_nbytes: int, results: Sequence[Any]) -> None:
        """It has ended, with these results."""
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
        """Whether a request of this direction is refused now. Gives the alarm that is due."""
        direction = self._directions[op]
        now = time.monotonic()
        if direction.found is not None:
            with self._lock:
                found, direction.found = direction.found, None
                is_first = found is not None and not direction.alarmed
                direction.alarmed = direction.alarmed or is_first
                if found is not None and self._refuses:
                    direction.refused_until = now + REFUSED_S
            if found is not None and is_first:
                self._alarm(op, found)
        return now < direction.refused_until

    def close(self) -> None:
        """The store is closed: give the alarms that are due."""
        self.is_refused("get")
        self.is_refused("put")


def host_load() -> float:
    """How many runnable threads there are for each processor: of this host, or, where this process may use
    only some of its processors, of this process, whichever is more."""
    host = os.cpu_count() or 1
    ours = len(os.sched_getaffinity(0))
    try:
        runnable = os.getloadavg()[0]
    except OSError:
        return 1.0
    try:
        with open("/proc/loadavg", encoding="ascii") as figures:
            runnable = max(runnable, int(figures.read().split()[3].partition("/")[0]) - 1)
    except (OSError, ValueError, IndexError):
        pass
    # Those figures are of all processors. Divided by a few, they would excuse a pinned process for anything.
    return max(runnable / host, _num_running() / ours if ours < host else 0.0)


def _num_running() -> int:
    """Threads of this process that run or could run, without this one."""
    running = -1
    try:
        for task in _TASKS.iterdir():
            try:
                running += (task / "stat").read_text().rpartition(") ")[2].startswith("R")
            except OSError:  # it has ended
                continue
    except OSError:
        return 0
    return max(0, running)
