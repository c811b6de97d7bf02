from __future__ import annotations

import threading
import time

import pytest
import torch

from kvplug_lookup.buffer.reach import ReachingEnd
from kvplug_lookup.buffer.store import SimpleStore
from lookup_thread_pipes import thread_pipes


class Joined:
    """A store, and reaching ends on pipes of threads."""

    def __init__(self):
        self.things = []

    def store(self, buffer_size=1 << 30, **options):
        store = SimpleStore(buffer_size=buffer_size, timeout_s=options.pop("timeout_s", 10), **options)
        self.things.append(store)
        return store

    def reach(self, store, *, limit=1 << 20, timeout_s=10):
        ours_signal, theirs_signal = thread_pipes()
        ours_data, theirs_data = thread_pipes(limit)
        store.attach(theirs_signal, theirs_data)
        end = ReachingEnd(ours_signal, ours_data, timeout_s=timeout_s)
        end.pipes = (ours_signal, ours_data)
        self.things.append(end)
        return end


@pytest.fixture
def joined():
    before = set(threading.enumerate())
    joined = Joined()
    yield joined
    for thing in reversed(joined.things):
        thing.abort()
    until = time.monotonic() + 5
    while left := [t.name for t in set(threading.enumerate()) - before if t.name.startswith("kvplug-")]:
        assert time.monotonic() < until, f"threads left behind: {left}"
        time.sleep(0.005)


@pytest.fixture
def entry():
    """Makes (tokens, roi, key, value, hidden) that tell one entry from another by its contents."""

    def make(tokens, *, roi=None, layers=2, heads=2, size=4, dtype=torch.float32, hidden=True):
        n = len(tokens)
        base = torch.arange(layers * n * heads * size).reshape(layers, n, heads, size) % 97 + sum(tokens) % 89
        last = torch.arange(n * 6).reshape(n, 6).to(dtype) if hidden else None
        return list(tokens), roi, base.to(dtype), (base + 1).to(dtype), last

    return make


@pytest.fixture
def started():
    """Runs functions in threads and hands back what they return or raise."""

    class Started:
        def __init__(self, function, args, kwargs):
            self.outcome = None

            def run():
                try:
                    self.outcome = (function(*args, **kwargs), None)
                except BaseException as e:
                    self.outcome = (None, e)

            self.thread = threading.Thread(target=run, daemon=True)
            self.thread.start()

        def result(self, timeout=10):
            self.thread.join(timeout)
            assert self.outcome is not None, "still running"
            if self.outcome[1] is not None:
                raise self.outcome[1]
            return self.outcome[0]

        def is_waiting(self, for_s=0.1):
            self.thread.join(for_s)
            return self.outcome is None

    return lambda function, *args, **kwargs: Started(function, args, kwargs)


@pytest.fixture
def eventually():
    def wait(condition, timeout=5):
        until = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < until, "it did not happen"
            time.sleep(0.002)

    return wait
