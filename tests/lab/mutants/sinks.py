"""A sink in memory with one fault each, and the laws that the fault breaks."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from kvplug.metrics.sinks import Sink
from kvplug.metrics.stats import StatsSnapshot
from kvplug_lab.mutants import breaks
from kvplug_testing import SinkContract


class Service:
    """Where the sinks of a test class send to."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.goes_on = threading.Event()
        self.goes_on.set()


class MemorySink(Sink):
    """Keeps every law."""

    patience_s = 0.2

    def __init__(self, service: Service) -> None:
        self.service = service

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        if not self.service.goes_on.wait(self.patience_s):
            raise TimeoutError("the service is stopped")
        for op, figures in snapshot["ops"].items():
            self.service.counted[op] += figures["count"]


class Mutant(SinkContract):
    """One fault, of ``kind_of_sink``."""

    forks = False
    settle_s = 0.5
    parts = ("kind_of_sink",)
    kind_of_sink: type[MemorySink] = MemorySink
    service: ClassVar[Service] = Service()

    def made(self) -> Sink:
        return self.kind_of_sink(self.service)

    def counted(self, op: str) -> float:
        return self.service.counted[op]

    def stop(self) -> Callable[[], Any]:
        self.service.goes_on.clear()
        return self.service.goes_on.set


@breaks(Mutant, "SINK-1")
class TestTakesWhatItKnows(MemorySink):
    """An unknown operation is an error."""

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        super().emit(snapshot, labels)
        for op in snapshot["ops"]:
            if op == "teleport":
                raise KeyError(op)


@breaks(Mutant, "SINK-1")
class TestEmptiesTheSnapshot(MemorySink):
    """The next sink gets a snapshot without operations."""

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        super().emit(snapshot, labels)
        dict.clear(snapshot["ops"])


@breaks(Mutant, "SINK-1")
class TestChangesTheLabels(MemorySink):
    """The next sink gets a label more."""

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        super().emit(snapshot, labels)
        dict.setdefault(labels, "host", "here")  # type: ignore[arg-type]


@breaks(Mutant, "SINK-2")
class TestSetsInsteadOfAdding(MemorySink):
    """The last figure counts, not the sum."""

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        for op, figures in snapshot["ops"].items():
            self.service.counted[op] = figures["count"]


@breaks(Mutant, "SINK-2")
class TestDropsTheLast(MemorySink):
    """A snapshot is sent with the next one, so that the last is never sent."""

    waiting: StatsSnapshot | None = None

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        waiting, self.waiting = self.waiting, snapshot
        if waiting is not None:
            super().emit(waiting, labels)


@breaks(Mutant, "SINK-3")
class TestLeavesADescriptor(MemorySink):
    """Closing leaves a descriptor open."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.fd = os.open(os.devnull, os.O_WRONLY)


@breaks(Mutant, "SINK-3")
class TestWaitsForTheService(MemorySink):
    """A call of a stopped service ends when that goes on."""

    def close(self) -> None:
        while not self.service.goes_on.is_set() and time.monotonic() < self.until:
            time.sleep(0.01)

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.until = time.monotonic() + 8


class TestControl(Mutant):
    """No fault."""

    is_control = True
