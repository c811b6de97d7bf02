"""How much memory this process can have. Sizes that a peer announces are checked against it before
allocation.

An allocation that is far too large does not always fail. If the kernel overcommits, the allocation succeeds,
and the process is killed when it uses the memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvplug.errors import CapacityError

_ALWAYS_BYTES: Final = 16 << 20
"""Sizes up to this are not compared with the system's limits."""
_FRESH_S: Final = 10.0
"""How long the limits of the machine and of control groups are cached: reading them takes longer than an
allocation."""
_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_LIMIT: Final = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USED: Final = {1: "memory.usage_in_bytes", 2: "memory.current"}
_FILES: Final = {1: "total_inactive_file", 2: "inactive_file"}


def memory_limit() -> int:
    """Return the most bytes that this process can have, including those already in use: the machine's memory,
    ``RLIMIT_AS``, ``RLIMIT_DATA``, or the limit of its control group, whichever is lowest.
    """
    limit = machine_memory()
    for number in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
    return limit


def machine_memory() -> int:
    """Return the most bytes that the processes of this process's control groups can have: the machine's
    memory, or the limit of a group, whichever is lowest.
    """
    return _of_machine(int(time.monotonic() / _FRESH_S))


def free_memory() -> int:
    """Return the bytes of :func:`machine_memory` that are free now or hold reclaimable file pages."""
    found = [machine_memory()]
    if (available := meminfo().get("MemAvailable:")) is not None:
        found.append(1024 * available)
    for group, version in _groups():
        limits = [*_limit_in(group / _LIMIT[version])]
        used = [*_limit_in(group / _USED[version])]
        if limits and used:
            files = 0
            with contextlib.suppress(OSError):
                files = dict(_numbers_in(group / "memory.stat")).get(_FILES[version], 0)
            found.append(limits[0] - max(0, used[0] - files))
    return max(0, min(found))


def meminfo() -> dict[str, int]:
    """Return the numbers in ``/proc/meminfo`` (kilobytes or pages) by name with its colon; empty if
    unreadable."""
    with contextlib.suppress(OSError):
        return dict(_numbers_in(_MEMINFO))
    return {}


class MessageLimit:
    """The size of the largest message to allocate memory for, checked before allocating. Thread-safe.

    A peer announces a message's size before its bytes. A message received into the caller's memory is not
    bounded.

    >>> limit = MessageLimit(1000)
    >>> limit.check(1000, "pid 7")
    >>> limit.check(1001, "pid 7")
    Traceback (most recent call last):
    kvplug.errors.CapacityError: the next message of pid 7 remains unreceived, since it has 1001 bytes, but...
    """

    def __init__(self, most: int | None = None, *, device: str = "cpu") -> None:
        """``most`` is the context's ``max_message_bytes``; ``None``: the memory that this process can have.

        ``device``: where the memory is. On devices other than the CPU, the allocator itself refuses sizes
        that are too large.
        """
        self._most = most
        self._on_host = device.partition(":")[0] == "cpu"

    @property
    def most(self) -> int:
        """The bound in bytes; ``sys.maxsize`` if only the memory of the process or device limits the size."""
        return sys.maxsize if self._most is None else self._most

    def lower(self, nbytes: int) -> None:
        """Accept no messages larger than ``nbytes`` from now on."""
        self._most = min(self.most, nbytes)

    def check(self, nbytes: int, peer: str) -> None:
        """Raises CapacityError: the next message of ``peer`` is too large; it stays unreceived."""
        self.check_size(nbytes, f"the next message of {peer} remains unreceived, since it")

    def check_size(self, nbytes: int, what: str) -> None:
        """Raises CapacityError: ``what``, announced by a peer, exceeds the limit, which the error names."""
        if self._most is not None:
            if nbytes > self._most:
                raise CapacityError(
                    f"{what} has {nbytes} bytes, but may have at most {self._most} (max_message_bytes)"
                )
        elif self._on_host and nbytes > _ALWAYS_BYTES and nbytes > (limit := memory_limit()):
            raise CapacityError(f"{what} has {nbytes} bytes, and this process can have at most {limit}")


@functools.lru_cache(maxsize=1)
def _of_machine(_: int) -> int:
    """Read the limits once per period."""
    limits = (limit for group, version in _groups() for limit in _limit_in(group / _LIMIT[version]))
    return min((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits))


def _groups() -> Iterator[tuple[Path, int]]:
    """Yield this process's control group and its parents, each with its version. In version 1, these are the
    memory controller's groups."""
    try:
        lines = _GROUP.read_text().splitlines()
    except OSError:  # not Linux, or /proc is missing
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, version = _GROUPS, 2
        elif "memory" in controllers.split(","):
            root, version = _GROUPS / "memory", 1
        else:
            continue
        inner = root / path.lstrip("/")
        for group in (inner, *inner.parents):
            yield group, version
            if group == root:
                break


def _limit_in(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:  # the root has no limit; a container may show only its own group, as the root
        return
    if text.isdigit():  # otherwise "max"
        yield int(text)


def _numbers_in(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and number of each line that has both. Raises OSError if the file cannot be read."""
    for line in file.read_text().splitlines():
        name, number, *_ = (*line.split(), "", "")
        if number.isdigit():
            yield name, int(number)
