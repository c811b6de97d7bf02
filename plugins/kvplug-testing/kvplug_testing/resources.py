"""The resources that a process holds: descriptors, threads, children, shared memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import attrs

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where Linux has it
_OF_PROCESSES = ("__KMP_REGISTERED_LIB_",)
"""Prefixes of names that a library (OpenMP) creates once in each process."""
_SEMAPHORE = "sem.mp-"
"""Prefix of the semaphores of Python's multiprocessing. A process maps each of its semaphores, and its
resource tracker unlinks them when it dies."""
_MOST_READINGS = 100
"""Limit for a list that never becomes stable."""

_MOST_SHOWN = 10
"""How many resources of a kind are named."""

_T = TypeVar("_T")


@attrs.frozen
class Resources:
    """The resources of a process."""

    descriptors: frozenset[str]
    """``"7 -> socket:[123]"``"""
    threads: frozenset[str]
    """``"kernel id name"``"""
    children: frozenset[int]
    """Process ids."""
    shared_memory: frozenset[str]
    """Names in /dev/shm that belong to this process's user, from all processes."""

    @classmethod
    def of(cls, pid: int | None = None) -> Resources:
        """The resources of a process of this user, by default of this process."""
        pid = os.getpid() if pid is None else pid
        return cls(
            _descriptors(pid),
            frozenset(f"{task} {_read(f'/proc/{pid}/task/{task}/comm').strip()}" for task in _tasks(pid)),
            frozenset(children(pid)),
            frozenset(_shared_memory()),
        )

    def beyond(self, before: Resources) -> str:
        """A description of the resources that ``before`` lacks; empty if there are none.

        Shared memory counts if this process or a descendant of it holds it, and also if no process at all
        does: a process that was killed may have left it. The latter is not so for a semaphore of Python's
        multiprocessing, which is then of a process that cannot be seen here. Names that are gone by now do
        not count.
        """
        words = []
        for field in attrs.fields(Resources):
            extra = getattr(self, field.name) - getattr(before, field.name)
            if extra and field.name == "shared_memory":
                extra = _left_here(extra)
            if extra:
                shown = sorted(map(_named if field.name == "threads" else str, extra))[:_MOST_SHOWN]
                more = [f"and {len(extra) - len(shown):,} more"] if len(extra) > len(shown) else []
                words.append(f"{field.name.replace('_', ' ')}: {', '.join(shown + more)}")
        return "; ".join(words)


def children(pid: int) -> list[int]:
    """Pids of the direct children of a process, zombies too."""

    def read() -> list[int]:
        lists = [_read(f"/proc/{pid}/task/{task}/children") for task in _tasks(pid)]
        return [int(child) for each in lists for child in each.split()]

    return steady(read)


def _named(task: str) -> str:
    """``"kernel id name"`` of a thread; of one of Python's in this process its name there."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    number = task.partition(" ")[0]
    return f"{number} {names[number]}" if number in names else task


def _shared_memory() -> Iterator[str]:
    """Names of this user's shared memory."""
    for name in _listdir(_SHARED_MEMORY):
        with contextlib.suppress(OSError):
            is_ours = os.lstat(f"{_SHARED_MEMORY}/{name}").st_uid == os.geteuid()
            if is_ours and not name.startswith(_OF_PROCESSES):
                yield name


def _left_here(names: frozenset[str]) -> frozenset[str]:
    """Those of the names that this process or a descendant of it holds or has left."""
    family = _family(os.getpid())
    held = {int(pid): names & _shared_memory_held(int(pid)) for pid in _listdir("/proc") if pid.isdecimal()}
    ours = {name for pid, each in held.items() if pid in family for name in each}
    unheld = {name for name in names.difference(*held.values()) if not name.startswith(_SEMAPHORE)}
    # Looked at last: a name that a process had and unlinked meanwhile is found at no process, and is gone.
    return frozenset(name for name in ours | unheld if os.path.lexists(f"{_SHARED_MEMORY}/{name}"))


def _family(pid: int) -> set[int]:
    """A process and all its descendants."""
    return {pid}.union(*map(_family, children(pid)))


def _shared_memory_held(pid: int) -> set[str]:
    """Names that a process has open or mapped."""
    paths = [entry.partition(" -> ")[2] for entry in _descriptors(pid)]
    before = f"{_SHARED_MEMORY}/"
    return {path.removeprefix(before) for path in (*paths, *mapped(pid)) if path.startswith(before)}


def mapped(pid: int, flag: str = "") -> list[str]:
    """The files that a process has mapped; memory without a name in a file system is one, too. ``flag``: only
    with it, "s" for shared.
    """
    rows = [line.split(maxsplit=5) for line in _read(f"/proc/{pid}/maps").split("\n")]
    return [row[5] for row in rows if len(row) == 6 and flag in row[1]]


def kernel_bytes(file: str, name: str) -> int:
    """A value that a file of Linux's /proc has in kB, in bytes."""
    lines = _read(f"/proc/{file}").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _descriptors(pid: int) -> frozenset[str]:
    found = set()
    for fd in _listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if not target.endswith("/fd"):  # the descriptor that this listing itself uses
                found.add(f"{fd} -> {target}")
    return frozenset(found)


def _tasks(pid: int) -> list[str]:
    """Kernel ids of the threads of a process."""
    return steady(lambda: _listdir(f"/proc/{pid}/task"))


def steady(read: Callable[[], list[_T]]) -> list[_T]:
    """The result on which two consecutive readings agree. While one thread or child ends, the kernel can omit
    the next one from the list although it is alive.
    """
    found = read()
    for _ in range(_MOST_READINGS):
        if (again := read()) == found:
            break
        found = again
    return found


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.fsdecode(Path(path).read_bytes())
    return ""


def _listdir(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []
