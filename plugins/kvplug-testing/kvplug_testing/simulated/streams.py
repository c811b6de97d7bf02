"""Streams and events of the simulated device, with the names that torch gives to those of a GPU.

Work is queued on streams and runs in one of them after the other, but between streams only events give an
order. Two things let queued work run: a thread that waits for it (then all that it depends on runs, in its
order, and nothing else), and a seeded choice at each call, which runs some of the work of some stream. So the
order in which streams run is another with each seed, and mostly late.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_RUNS_AHEAD: Final = 0.15
"""How likely a call lets some stream run."""

_changed: Final = threading.Condition()
"""Its lock guards all streams."""
_streams: Final[list[Stream]] = []
_choice = random.Random(0)
_num_stalls = 0
_num_until_failure = math.inf
"""How many more pieces of work can be queued before the device fails."""
_mine: Final = threading.local()


class Stream:
    """Work that runs in the order in which it was queued."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        """The arguments are those of torch, and mean nothing here."""
        import torch

        self.device = torch.device("privateuseone:0")
        """The device, as torch names it."""
        self._queue: deque[Callable[[], object]] = deque()
        self.num_queued = 0
        """Pieces of work that were queued so far."""
        self.num_done = 0
        """Pieces of work that have run so far."""
        with _changed:
            _streams.append(self)

    def queue(self, work: Callable[[], object]) -> None:
        """Queue a function without arguments, which runs when the stream comes to it."""
        global _num_until_failure
        with _changed:
            _num_until_failure -= 1
            if _num_until_failure < 0:
                raise RuntimeError("the simulated device fails")
            self._queue.append(work)
            self.num_queued += 1
            _run_ahead()

    def query(self) -> bool:
        """Whether all of it has run."""
        return self.has_done(self.num_queued)

    def has_done(self, count: int) -> bool:
        """Whether its first so many pieces of work have run."""
        with _changed:
            _run_ahead(self)
            return self.num_done >= count

    def synchronize(self) -> None:
        """Return when all that is queued by now has run."""
        self.run(self.num_queued)

    def wait_event(self, event: Event) -> None:
        """What is queued next runs after the event."""
        stream, count = event.stream, event.count
        if stream is not None:
            self.queue(lambda: stream.run(count))

    def run(self, count: int) -> None:
        """Run its first so many pieces of work, and what they wait for."""
        with _changed:
            while self.num_done < count:
                if _num_stalls:
                    _changed.wait()
                else:
                    self.num_done += 1
                    self._queue.popleft()()


class Event:
    """A place in a stream."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        """The arguments are those of torch, and mean nothing here but the first."""
        self._is_timed = enable_timing
        self.stream: Stream | None = None
        """The stream; ``None`` until it is recorded."""
        self.count = 0
        """How much of the stream's work is before it."""
        self._passed_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Its place is behind all that is queued by now, on the given or the current stream."""
        stream = stream or current_stream()
        with _changed:
            if stream.num_done == stream.num_queued:
                self._pass()
            elif self._is_timed:
                stream.queue(self._pass)
            self.stream, self.count = stream, stream.num_queued

    def _pass(self) -> None:
        self._passed_at = time.monotonic()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between this event and a later one, which has passed."""
        return (end._passed_at - self._passed_at) * 1e3

    def query(self) -> bool:
        """Whether all that is before it has run; true if it was never recorded."""
        return self.stream is None or self.stream.has_done(self.count)

    def synchronize(self) -> None:
        """Return when all that is before it has run."""
        if self.stream is not None:
            self.stream.run(self.count)

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
    if left := chosen.num_queued - chosen.num_done:
        chosen.run(chosen.num_done + _choice.randint(1, left))


def default_stream(device: Any = None) -> Stream:
    with _changed:
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
    with _changed:
        for stream in _streams:
            stream.synchronize()


@contextmanager
def choosing(seed: int) -> Iterator[None]:
    """The choices in the block are those of this seed. What was queued before, and in it, runs first."""
    global _choice
    synchronize()
    _choice = random.Random(seed)
    yield
    synchronize()


@contextmanager
def stalled() -> Iterator[None]:
    """While the block runs, the device does nothing: a wait for it lasts until the block ends."""
    global _num_stalls
    with _changed:
        _num_stalls += 1
    try:
        yield
    finally:
        with _changed:
            _num_stalls -= 1
            _changed.notify_all()


@contextmanager
def failing(after: int) -> Iterator[None]:
    """In the block the device takes so many pieces of work, and then fails."""
    global _num_until_failure
    _num_until_failure = after
    try:
        yield
    finally:
        _num_until_failure = math.inf
