"""Streams and events of the simulated device, with the names that torch gives to those of a GPU.

Work is queued on streams and runs in one of them after the other, but between streams only events give an
order. Two things let queued work run: a thread that waits for it (then all that it depends on runs, in its
order, and nothing else), and a seeded choice at each call, which runs some of the work of some stream. So the
order in which streams run is another with each seed, and mostly late.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import attrs

Work: TypeAlias = Callable[[], object]

_RUNS_AHEAD: Final = 0.15
"""How likely a call lets some stream run."""

_lock: Final = threading.RLock()
_changed: Final = threading.Condition(_lock)
_streams: Final[list[Stream]] = []
_choice = random.Random(0)
_num_stalls = 0
_mine: Final = threading.local()


@attrs.frozen
class _Order:
    """What comes next runs after the first so many pieces of work of another stream."""

    stream: Stream
    count: int


class Stream:
    """Work that runs in the order in which it was queued."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        """The arguments are those of torch, and mean nothing here."""
        import torch

        self.device = torch.device("privateuseone:0")
        """The device, as torch names it."""
        self._queue: deque[Work | _Order] = deque()
        self.num_queued = 0
        """Pieces of work that were queued so far."""
        self.num_done = 0
        """Pieces of work that have run so far."""
        with _lock:
            _streams.append(self)

    def queue(self, work: Work | _Order) -> None:
        """Queue a function without arguments, which runs when the stream comes to it."""
        with _lock:
            self._queue.append(work)
            self.num_queued += 1
            _run_ahead()

    def query(self) -> bool:
        """Whether all of it has run."""
        with _lock:
            _run_ahead(self)
            return self.num_done == self.num_queued

    def synchronize(self) -> None:
        """Return when all that is queued by now has run."""
        with _lock:
            self.run(self.num_queued)

    def wait_event(self, event: Event) -> None:
        """What is queued next runs after the event."""
        if event.after is not None:
            self.queue(event.after)

    def run(self, count: int) -> None:
        """With the lock: run its first so many pieces of work, and what they wait for."""
        while self.num_done < count:
            while _num_stalls:
                _changed.wait()
                if self.num_done >= count:
                    return
            work = self._queue.popleft()
            self.num_done += 1
            if isinstance(work, _Order):
                work.stream.run(work.count)
            else:
                work()


class Event:
    """A place in a stream."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        """The arguments are those of torch, and mean nothing here but the first."""
        self.after: _Order | None = None
        """The place; ``None`` until it is recorded."""
        self._is_timed = enable_timing
        self._passed_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Its place is behind all that is queued by now, on the given or the current stream."""
        stream = stream or current_stream()
        with _lock:
            if stream.num_done == stream.num_queued:
                self._pass()
            elif self._is_timed:
                stream.queue(self._pass)
            self.after = _Order(stream, stream.num_queued)

    def _pass(self) -> None:
        self._passed_at = time.monotonic()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between this event and a later one. Both were made with ``enable_timing``."""
        assert self._is_timed and end._is_timed and self.query() and end.query()
        return (end._passed_at - self._passed_at) * 1e3

    def query(self) -> bool:
        """Whether all that is before it has run; true if it was never recorded."""
        after = self.after
        if after is None:
            return True
        with _lock:
            _run_ahead(after.stream)
            return after.stream.num_done >= after.count

    def synchronize(self) -> None:
        """Return when all that is before it has run."""
        with _lock:
            if self.after is not None:
                self.after.stream.run(self.after.count)

    def wait(self, stream: Stream | None = None) -> None:
        """What is queued next on the given or the current stream runs after it."""
        (stream or current_stream()).wait_event(self)


def _run_ahead(asked: Stream | None = None) -> None:
    """With the lock: perhaps run some work. ``asked``: a thread looks at what this stream has done."""
    if _num_stalls:
        return
    if asked is not None and _choice.random() < 0.5:
        chosen = asked
    elif _choice.random() < _RUNS_AHEAD:
        chosen = _choice.choice(_streams)
    else:
        return
    left = chosen.num_queued - chosen.num_done
    if left:
        chosen.run(chosen.num_done + _choice.randint(1, left))


def default_stream(device: Any = None) -> Stream:
    with _lock:
        return _streams[0] if _streams else Stream()


def current_stream(device: Any = None) -> Stream:
    """The stream on which the calling thread queues work: the default one, unless it has chosen another."""
    return getattr(_mine, "stream", None) or default_stream()


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """The calling thread queues work on this stream."""
    before = getattr(_mine, "stream", None)
    _mine.stream = stream
    try:
        yield
    finally:
        _mine.stream = before


def synchronize(device: Any = None) -> None:
    """Return when everything has run."""
    with _lock:
        for stream in _streams:
            stream.run(stream.num_queued)


@contextmanager
def choosing(seed: int) -> Iterator[None]:
    """The choices in the block are those of this seed. What was queued before, and in it, runs first."""
    global _choice
    synchronize()
    with _lock:
        _choice = random.Random(seed)
    yield
    synchronize()


@contextmanager
def stalled() -> Iterator[None]:
    """While the block runs, the device does nothing: who waits for it waits until the block ends."""
    global _num_stalls
    with _lock:
        _num_stalls += 1
    try:
        yield
    finally:
        with _lock:
            _num_stalls -= 1
            _changed.notify_all()
