"""Whether a path carries far less than its transport claims, or than it carried before.

Only sends are judged, by the end that sends. A receive lasts from the call on, so with the time in which the
peer has nothing to send yet; a send lasts until the peer has taken the message, and mostly the peer waits for
it. What is not the path's fault is left out as far as can be seen: waiting behind earlier messages of the
same pipe, other pipes of this process that send at the same time, and a host with more runnable threads than
processors. One fast batch ends a suspicion.

What comes out of a store and goes into it is judged in the same way: see :mod:`kvplug.metrics.store_rate`.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import attrs

from kvplug.transport.capabilities import Cost

LEAST_BYTES: Final = 1 << 20
"""Smaller messages say more of the latency than of the path, and are not measured."""
CLAIM_FACTOR: Final = 10
"""A path is slow that needs this many times as long as its transport claims."""
HISTORY_FACTOR: Final = 5
"""A path is slow that needs this many times as long as the median of what it did before."""

_BATCH_BYTES: Final = 8 << 20
"""Sends are judged in batches of so much, so that what a socket buffers does not count as fast."""
_BATCH_S: Final = 0.25
"""A batch ends after so much time too: of a very slow path."""
_SLOW_BATCHES: Final = 8
_SLOW_S: Final = 3.0
"""So many batches in a row are slow, and take at least so many seconds, before an alarm. Time between them
does not count: a few messages an hour, each late by some milliseconds, are no reason to warn."""
_HISTORY: Final = 64
_LEAST_HISTORY: Final = 16
"""Batches that were not slow: the latest ones, and how many it takes to compare with."""
_MOST_LOAD: Final = 16.0
"""A host that is busier than so many threads for each processor is not excused for more."""
_WORDS: Final = {5: "a fifth", 10: "a tenth", 20: "a twentieth"}
_TASKS: Final = Path("/proc/self/task")

Against = Literal["claim", "history"]


@attrs.frozen(kw_only=True)
class Finding:
    """A slow path: what was measured, and what it was compared with. Rates are in 10^9 bytes per second."""

    against: Against
    gb_per_s: float
    expected_gb_per_s: float
    """The claim; or what the path carried before."""
    nbytes: int = 0
    seconds: float = 0.0
    """Of the sends that were measured; 0: the transport measured it when the pipe began."""
    factor: int = HISTORY_FACTOR
    """Of the history: how many times slower than that counts as slow."""

    def __str__(self) -> str:
        if self.against == "claim":
            compared = (
                f"{_WORDS[CLAIM_FACTOR]} of the {self.expected_gb_per_s:.3g} GB/s that its transport claims"
            )
        else:
            share = _WORDS.get(self.factor, f"1/{self.factor}")
            compared = f"{share} of the {self.expected_gb_per_s:.3g} GB/s that it carried before"
        moved = f"{self.nbytes >> 20} MiB in {self.seconds:.3g} s" if self.nbytes else "at its start"
        return f"carries {self.gb_per_s:.3g} GB/s ({moved}), less than {compared}"


@attrs.define(eq=False)
class _Usual:
    """The rates of batches that were not slow, of messages of one order of size."""

    rates: deque[float] = attrs.field(factory=lambda: deque(maxlen=_HISTORY))
    since: int = 0
    """How many came after ``usual`` was computed."""
    usual: float = 0.0
    """0: there are too few."""

    def note(self, rate: float, *, keeps_best: bool) -> None:
        self.rates.append(rate)
        self.since += 1
        if self.since >= _LEAST_HISTORY:
            median = statistics.median(self.rates)
            self.since, self.usual = 0, max(self.usual, median) if keeps_best else median


class PathRate:
    """The rate of the sends to one peer by one transport. Thread-safe; remembers across pipes."""

    def __init__(
        self,
        claim: Cost | None,
        *,
        factor: int = HISTORY_FACTOR,
        keeps_best: bool = False,
        most_gb_per_s: float = float("inf"),
        busy: Callable[[], float] | None = None,
        measured: Callable[[PathRate], object] | None = None,
    ) -> None:
        """
        Args:
            claim: what the transport claims; ``None``: only the history counts.
            factor: how many times slower than its history a path is slow.
            keeps_best: whether the history is the best median there was, not that of the latest batches.
            most_gb_per_s: what was faster counts as this fast in the history.
            busy: how many runnable threads there are for each processor (default: of this host).
            measured: called with this object when a first rate is known, in the thread that sends.
        """
        self.claim = claim
        self._factor = factor
        self._keeps_best = keeps_best
        self._most = most_gb_per_s
        self._measured = measured
        self._busy = host_load if busy is None else busy
        self._lock = threading.Lock()
        self._count, self._nbytes, self._seconds, self._claimed_s = 0, 0, 0.0, 0.0
        self._usual: dict[int, _Usual] = {}
        """By the mean size of a batch's messages, to a power of four: where each message has a latency of its
        own, small ones are slower, and that is no fault."""
        self._batches, self._streak_bytes, self._streak_s = 0, 0, 0.0
        self._of_claim = self._of_usual = float("inf")
        """How many times slower than it should be the best batch of the streak was."""
        self.alarmed = False
        """An alarm was given: it is given once."""

    def sent(self, nbytes: int, seconds: float) -> Finding | None:
        """One message was sent in ``seconds``, its share of the time in which others were sent as well.
        Returns what is to be told, if anything."""
        with self._lock:
            self._count += 1
            self._nbytes += nbytes
            self._seconds += seconds
            if self.claim is not None:
                self._claimed_s += self.claim.seconds(nbytes)
            if self._nbytes < _BATCH_BYTES and self._seconds < _BATCH_S:
                return None
            measured, self._measured = self._measured, None
            found = self._batch()
        if measured is not None:
            measured(self)
        return found

    def first_alarm(self) -> bool:
        """Whether no alarm was given before; one is given now."""
        with self._lock:
            first, self.alarmed = not self.alarmed, True
            measured, self._measured = self._measured, None
        if measured is not None:
            measured(self)
        return first

    def _batch(self) -> Finding | None:
        nbytes, seconds, claimed_s = self._nbytes, max(self._seconds, 1e-9), self._claimed_s
        size = (nbytes // self._count).bit_length() // 2
        self._count, self._nbytes, self._seconds, self._claimed_s = 0, 0, 0.0, 0.0
        rate = nbytes / 1e9 / seconds
        known = self._usual.get(size)
        if known is None:
            known = self._usual[size] = _Usual()
        of_claim = seconds / claimed_s if claimed_s else 0.0
        of_usual = known.usual / rate
        if of_claim <= CLAIM_FACTOR and of_usual <= self._factor:
            known.note(min(rate, self._most), keeps_best=self._keeps_best)
            self._forget_streak()
            return None
        self._batches += 1
        self._streak_bytes += nbytes
        self._streak_s += seconds
        self._of_claim = min(self._of_claim, of_claim)
        self._of_usual = min(self._of_usual, of_usual)
        if self._batches < _SLOW_BATCHES or self._streak_s < _SLOW_S:
            return None
        found = self._judged(known.usual)
        self._forget_streak()
        return found

    def _judged(self, usual: float) -> Finding | None:
        """Of a whole streak of slow batches; the best of them has to be slow on an idle host as well."""
        # Squared: a busy host keeps both ends waiting, and each piece of a message waits for both.
        excuse = min(max(1.0, self._busy()), _MOST_LOAD) ** 2
        if self.claim is not None and self._of_claim > CLAIM_FACTOR * excuse:
            against: Against = "claim"
            expected = self.claim.gb_per_s
        elif self._of_usual > self._factor * excuse:
            against, expected = "history", usual
        else:
            return None
        return Finding(
            against=against,
            gb_per_s=self._streak_bytes / 1e9 / self._streak_s,
            expected_gb_per_s=expected,
            nbytes=self._streak_bytes,
            seconds=self._streak_s,
            factor=self._factor,
        )

    def _forget_streak(self) -> None:
        self._batches, self._streak_bytes, self._streak_s = 0, 0, 0.0
        self._of_claim = self._of_usual = float("inf")


class SharedTime:
    """Time that is divided among those who use something at the same time: while ``n`` do, it goes by ``n``
    times more slowly. What one of them took of it is what it would have taken alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may abort a pipe
        self._users = 0
        self._until = self._time = 0.0

    def begins(self, now: float) -> float:
        """One more uses it. Returns the shared time."""
        with self._lock:
            shared = self._pass(now)
            self._users += 1
            return shared

    def ends(self, now: float) -> float:
        """One fewer uses it. Returns the shared time."""
        with self._lock:
            shared = self._pass(now)
            self._users = max(0, self._users - 1)
            return shared

    def at(self, now: float) -> float:
        """The shared time."""
        with self._lock:
            return self._pass(now)

    def _pass(self, now: float) -> float:
        if now > self._until:
            if self._users:
                self._time += (now - self._until) / self._users
            self._until = now
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
    """Measures the large sends of one pipe for a :class:`PathRate`, and keeps the alarm until it is told.

    ``tell(finding)`` is called in a thread of the pipe's user, at the next call on the pipe: it may take a
    moment, and transfers end in threads of the transport. It returns the error with which the pipe is refused
    from then on, or ``None``.
    """

    def __init__(self, rate: PathRate, tell: Callable[[Finding], Exception | None]) -> None:
        self._rate = rate
        self._tell = tell
        self._lock = threading.RLock()
        self._number = 0
        self._large: deque[int] = deque()
        """The numbers of the large sends that are under way."""
        self._ended = 0.0
        """When the latest message ended that was not sent after a large one that is under way."""
        self._finding: Finding | None = None
        self._refusal: Exception | None = None
        self.due = False
        """There is an alarm to tell, or the pipe is refused."""

    def __del__(self) -> None:
        if self._large:
            _sending.ends(time.perf_counter())

    def begins(self, nbytes: int, now: float) -> Sending:
        """A message is going to be sent."""
        if nbytes < LEAST_BYTES:
            self._number += 1
            return self._number
        with self._lock:
            self._number += 1
            shared = _sending.at(now) if self._large else _sending.begins(now)
            self._large.append(self._number)
            return LargeSend(self._number, now, shared)

    def ends(self, sending: Sending, nbytes: int, now: float) -> None:
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
            shared = (_sending.at(now) if self._large else _sending.ends(now)) - shared
            alone_since, self._ended = max(began, self._ended), max(now, self._ended)
        if not nbytes:
            return
        took = max(now - began, 1e-9)
        found = self._rate.sent(nbytes, max(0.0, now - alone_since) * min(1.0, shared / took))
        if found is not None:
            with self._lock:
                self._finding, self.due = found, True

    def take_alarm(self) -> Exception | None:
        """Tell what is due; returns the error with which the pipe is refused, if it is."""
        with self._lock:
            found, self._finding = self._finding, None
        refusal = self._tell(found) if found is not None else None
        with self._lock:
            self._refusal = self._refusal or refusal
            self.due = self._refusal is not None or self._finding is not None
            return self._refusal

    def close(self, *, tell: bool) -> None:
        """The pipe is closed. ``tell``: what was not told; not in a signal's handler."""
        if tell and self._finding is not None:
            self.take_alarm()


def host_load() -> float:
    """How many runnable threads there are for each processor: of this host, or, where this process may use
    only some of its processors, of this process, whichever is more."""
    host = os.cpu_count() or 1
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    try:
        runnable = os.getloadavg()[0]
    except OSError:
        return 1.0
    try:
        with open("/proc/loadavg", encoding="ascii") as told:
            runnable = max(runnable, int(told.read().split()[3].partition("/")[0]) - 1)
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
