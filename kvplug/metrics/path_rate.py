"""Whether a path carries far less than its transport claims, or than it carried before.

Only sends are judged, by the end that sends. A receive lasts from the call on, so with the time in which the
peer has nothing to send yet; a send lasts until the peer has taken the message, and mostly the peer waits for
it. What is not the path's fault is left out as far as can be seen: waiting behind earlier messages of the
same pipe, other pipes of this process that send at the same time, and a host with more runnable threads than
processors. One fast batch ends a suspicion.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

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
"""So many batches in a row are slow, for at least so many seconds, before an alarm."""
_HISTORY: Final = 64
_LEAST_HISTORY: Final = 16
"""Batches that were not slow: the latest ones, and how many it takes to compare with."""
_MOST_LOAD: Final = 16.0
"""A host that is busier than so many threads for each processor is not excused for more."""

Against = Literal["claim", "history"]


@attrs.frozen(kw_only=True)
class Finding:
    """A slow path: what was measured, and what it was compared with. Rates are in 10^9 bytes per second."""

    against: Against
    gb_per_s: float
    expected_gb_per_s: float
    """The claim; or the median of the path's history."""
    nbytes: int = 0
    seconds: float = 0.0
    """Of the sends that were measured; 0: the transport measured it when the pipe began."""

    def __str__(self) -> str:
        if self.against == "claim":
            compared = f"less than a tenth of the {self.expected_gb_per_s:.3g} GB/s that its transport claims"
        else:
            compared = f"less than a fifth of the {self.expected_gb_per_s:.3g} GB/s that it carried before"
        moved = f"{self.nbytes >> 20} MiB in {self.seconds:.3g} s" if self.nbytes else "at its start"
        return f"carries {self.gb_per_s:.3g} GB/s ({moved}), {compared}"


class PathRate:
    """The rate of the sends to one peer by one transport. Thread-safe; remembers across pipes."""

    def __init__(
        self,
        claim: Cost | None,
        *,
        busy: Callable[[], float] | None = None,
        measured: Callable[[PathRate], object] | None = None,
    ) -> None:
        """
        Args:
            claim: what the transport claims; ``None``: only the history counts.
            busy: how many runnable threads there are for each processor (default: of this host).
            measured: called with this object when a first rate is known, in the thread that sends.
        """
        self.claim = claim
        self._measured = measured
        self._busy = host_load if busy is None else busy
        self._lock = threading.Lock()
        self._nbytes, self._seconds, self._claimed_s = 0, 0.0, 0.0
        self._history: deque[float] = deque(maxlen=_HISTORY)
        self._batches, self._since = 0, 0.0
        self._streak_bytes, self._streak_s = 0, 0.0
        self._best_of_claim, self._best_rate = float("inf"), 0.0
        self.alarmed = False
        """An alarm was given: it is given once."""

    def sent(self, nbytes: int, seconds: float, now: float, *, shares: int = 1) -> Finding | None:
        """One message was sent in ``seconds``, in which ``shares`` pipes of this process sent. Returns what
        is to be told, if anything."""
        with self._lock:
            self._nbytes += nbytes
            self._seconds += seconds / shares
            if self.claim is not None:
                self._claimed_s += self.claim.seconds(nbytes)
            if self._nbytes < _BATCH_BYTES and self._seconds < _BATCH_S:
                return None
            measured, self._measured = self._measured, None
            found = self._batch(now)
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

    def _batch(self, now: float) -> Finding | None:
        nbytes, seconds, claimed_s = self._nbytes, self._seconds, self._claimed_s
        self._nbytes, self._seconds, self._claimed_s = 0, 0.0, 0.0
        rate = nbytes / 1e9 / max(seconds, 1e-9)
        usual = statistics.median(self._history) if len(self._history) >= _LEAST_HISTORY else 0.0
        by_claim = self.claim is not None and seconds > CLAIM_FACTOR * claimed_s
        if not by_claim and rate >= usual / HISTORY_FACTOR:
            self._history.append(rate)
            self._forget_streak(now)
            return None
        if not self._batches:
            self._since = now - seconds
        self._batches += 1
        self._streak_bytes += nbytes
        self._streak_s += seconds
        self._best_of_claim = min(self._best_of_claim, seconds / claimed_s if claimed_s else float("inf"))
        self._best_rate = max(self._best_rate, rate)
        if self._batches < _SLOW_BATCHES or now - self._since < _SLOW_S:
            return None
        found = self._judged(usual)
        self._forget_streak(now)
        return found

    def _judged(self, usual: float) -> Finding | None:
        """Of a whole streak of slow batches; the best of them has to be slow on an idle host as well."""
        # Squared: a busy host keeps both ends waiting, and each piece of a message waits for both.
        excuse = min(max(1.0, self._busy()), _MOST_LOAD) ** 2
        measured = self._streak_bytes / 1e9 / self._streak_s
        if self.claim is not None and self._best_of_claim > CLAIM_FACTOR * excuse:
            against: Against = "claim"
            expected = self.claim.gb_per_s
        elif self._best_rate * excuse < usual / HISTORY_FACTOR:
            against, expected = "history", usual
        else:
            return None
        return Finding(
            against=against,
            gb_per_s=measured,
            expected_gb_per_s=expected,
            nbytes=self._streak_bytes,
            seconds=self._streak_s,
        )

    def _forget_streak(self, now: float) -> None:
        self._batches, self._since = 0, now
        self._streak_bytes, self._streak_s = 0, 0.0
        self._best_of_claim, self._best_rate = float("inf"), 0.0


class _Sending:
    """Which pipes of this process send large messages, and when each ended the latest one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may abort a pipe
        self._latest: dict[int, float] = {}
        """By the id of a pipe's watch; infinite: it is sending."""

    def begins(self, pipe: int) -> None:
        with self._lock:
            self._latest[pipe] = float("inf")

    def ends(self, pipe: int, began: float, now: float, *, goes_on: bool) -> int:
        """How many pipes have sent since ``began``, this one included."""
        with self._lock:
            shares = len([1 for latest in list(self._latest.values()) if latest >= began])
            if not goes_on:
                self._latest[pipe] = now
            return max(shares, 1)

    def forget(self, pipe: int) -> None:
        with self._lock:
            self._latest.pop(pipe, None)

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self._latest = {}


_sending = _Sending()
os.register_at_fork(after_in_child=_sending.after_fork)


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
        self._under_way = 0
        self._ended = 0.0
        self._finding: Finding | None = None
        self._refusal: Exception | None = None
        self.due = False
        """There is an alarm to tell, or the pipe is refused."""

    def __del__(self) -> None:
        _sending.forget(id(self))

    def begins(self) -> None:
        """A large send is under way."""
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                _sending.begins(id(self))

    def ends(self, nbytes: int, began: float, now: float) -> None:
        """It has succeeded; with no bytes: it has failed."""
        with self._lock:
            self._under_way -= 1
            alone_since, self._ended = max(began, self._ended), now
            shares = _sending.ends(id(self), began, now, goes_on=self._under_way > 0)
        if not nbytes:
            return
        found = self._rate.sent(nbytes, now - alone_since, now, shares=shares)
        if found is not None:
            self._finding, self.due = found, True

    def take_alarm(self) -> Exception | None:
        """Tell what is due; returns the error with which the pipe is refused, if it is."""
        found, self._finding = self._finding, None
        if found is not None:
            self._refusal = self._refusal or self._tell(found)
        self.due = self._refusal is not None
        return self._refusal

    def close(self, *, tell: bool) -> None:
        """The pipe is closed. ``tell``: what was not told; not in a signal's handler."""
        _sending.forget(id(self))
        if tell and self._finding is not None:
            self.take_alarm()


def host_load() -> float:
    """How many runnable threads of this host there are for each processor that this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        runnable = os.getloadavg()[0]
    except OSError:
        return 1.0
    try:
        with open("/proc/loadavg", encoding="ascii") as told:
            runnable = max(runnable, int(told.read().split()[3].partition("/")[0]) - 1)
    except (OSError, ValueError, IndexError):
        pass
    return runnable / cpus
