"""A directory in memory with one fault each, and the laws that the fault breaks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from kvplug.transport import Address
from kvplug.transport.directory import Directory
from kvplug_lab.mutants import breaks
from kvplug_testing import DirectoryContract

Entries = dict[str, tuple[bytes, float]]
"""What was announced, and until when."""


class Service:
    """What directories of one test class share: entries by URL, and whether it is stopped."""

    def __init__(self) -> None:
        self.entries: dict[str, Entries] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()


class MemoryDirectory(Directory):
    """Keeps every law."""

    def __init__(self, service: Service, url: str, timeout_s: float) -> None:
        self.check(url)
        self.service, self.timeout_s = service, timeout_s
        self.kept = service.entries.setdefault(url, {})

    def check(self, url: str) -> None:
        Address.parse_server(url.partition("://")[2].partition("/")[0])

    def wait(self) -> None:
        if not self.service.goes_on.wait(self.timeout_s):
            raise TimeoutError("the service is stopped")

    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        self.wait()
        self.kept[name] = entry, time.monotonic() + lease_s

    def withdraw(self, name: str) -> None:
        self.wait()
        self.kept.pop(name, None)

    def entries(self) -> Mapping[str, bytes]:
        self.wait()
        now = time.monotonic()
        return {name: entry for name, (entry, until) in self.kept.items() if until > now}


class Mutant(DirectoryContract):
    """One fault, of ``made``."""

    across_processes = False
    forks = False
    lease_s = 0.2
    late_s = 0.2
    timeout_s = 0.2
    parts = ("made",)
    made: type[MemoryDirectory] = MemoryDirectory
    service: ClassVar[Service] = Service()
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def url(self) -> str:
        return f"memory://127.0.0.1:1/{next(self.numbers)}"

    def opened(self, url: str) -> Directory:
        return self.made(self.service, url, self.timeout_s)

    def stop(self) -> Callable[[], Any]:
        self.service.goes_on.clear()
        return self.service.goes_on.set


@breaks(Mutant, "DIR-1")
class TestKeepsTheFirst(MemoryDirectory):
    """An announcement does not replace the one before it."""

    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        if name not in self.kept:
            super().announce(name, entry, lease_s)


@breaks(Mutant, "DIR-1")
class TestSeesItsOwnOnly(MemoryDirectory):
    """What others announce is not seen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = {}


@breaks(Mutant, "DIR-1")
class TestWithdrawsByPrefix(MemoryDirectory):
    """Other names that begin alike are withdrawn, too."""

    def withdraw(self, name: str) -> None:
        for other in [each for each in self.kept if each.startswith(name)]:
            super().withdraw(other)


@breaks(Mutant, "DIR-2")
class TestForgetsNothing(MemoryDirectory):
    """An entry stays when its lease has ended."""

    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        super().announce(name, entry, 1e9)


@breaks(Mutant, "DIR-2")
class TestRenewsNothing(MemoryDirectory):
    """An entry goes at the end of its first lease, however often it is announced."""

    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        until = self.kept[name][1] if name in self.kept else time.monotonic() + lease_s
        super().announce(name, entry, lease_s)
        self.kept[name] = entry, until


@breaks(Mutant, "DIR-3")
class TestWaitsForTheService(MemoryDirectory):
    """A call of a stopped service ends when that goes on."""

    def wait(self) -> None:
        if not self.service.goes_on.wait(self.timeout_s + 3):
            raise TimeoutError("the service is stopped")


@breaks(Mutant, "DIR-3")
class TestConnectsAtOnce(MemoryDirectory):
    """Making one waits for the service."""

    def __init__(self, service: Service, url: str, timeout_s: float) -> None:
        super().__init__(service, url, timeout_s)
        service.goes_on.wait(timeout_s + 2)


@breaks(Mutant, "DIR-4")
class TestTakesAnyAddress(MemoryDirectory):
    """A wrong port is found when the service is dialled."""

    def check(self, url: str) -> None:
        pass


class TestDirectories(Mutant):
    is_control = True
