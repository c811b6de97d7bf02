from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch

from kvplug_lookup.buffer.reach import ReachingEnd
from kvplug_lookup.buffer.store import SimpleStore
from kvplug_testing.contract.lookup.suite import pipe_endpoint
from kvplug_testing.pairs import PipePairs
from kvplug_testing.waits import until


class Joined(ExitStack):
    """Stores "simple", and ends that reach them over pipes in this process."""

    def store(self, buffer_size=1 << 30, **options):
        store = SimpleStore(buffer_size=buffer_size, timeout_s=10, **options)
        self.callback(store.abort)
        return store

    def pipes(self, limit=1 << 20, **context):
        """A pair whose transfers end when they are received."""
        options = {"eager": False, "max_in_flight_bytes": limit}
        return self.enter_context(PipePairs()).local(pipe_endpoint("memory", 10, options, **context))

    def served(self, store, limit=1 << 20):
        """The signal pipe and the data pipe of one more end of the store."""
        signal, theirs_signal = self.pipes()
        data, theirs_data = self.pipes(limit)
        store.attach(theirs_signal, theirs_data)
        return signal, data

    def reach(self, store, limit=1 << 20):
        signal, data = self.served(store, limit)
        end = ReachingEnd(signal, data, timeout_s=10)
        self.callback(end.abort)
        return end


@pytest.fixture
def joined():
    before = set(threading.enumerate())
    with Joined() as joined:
        yield joined

    def left():
        return [each for each in {*threading.enumerate()} - before if each.name.startswith("kvplug-")]

    until(lambda: not left(), what="the end of all threads")


@pytest.fixture
def entry():
    """Makes (tokens, roi, key, value, hidden) that tell one entry from another by its contents."""

    def make(tokens, *, layers=2):
        n = len(tokens)
        base = torch.arange(layers * n * 2 * 4.0).reshape(layers, n, 2, 4) % 97 + sum(tokens) % 89
        return list(tokens), None, base, base + 1, torch.arange(n * 6.0).reshape(n, 6)

    return make
