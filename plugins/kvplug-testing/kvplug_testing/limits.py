"""Limits on what this process can have: the n-th descriptor, thread, page of memory or of a file is refused.

For child processes of tests, which may be left with less than they need::

    with limits.descriptors(3):
        ...  # the fourth new descriptor is refused with EMFILE

The kernel itself refuses descriptors, memory and space, so that libraries in C meet the limit too. Threads
are refused by Python: the kernel's limit does not hold for root.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

import attrs

from kvplug_testing.resources import kernel_bytes

PAGE: Final = 4096
MEMORY_STEP: Final = 2 << 20
"""Bytes of addresses that :func:`memory` counts in."""
_RESERVE_BYTES: Final = 16 << 20
_STACK_BYTES: Final = 256 << 10
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES: Final = 1 << 20
"""The C library asks the system for each block from this size on, and gives it back: otherwise what was freed
once, or is reserved for a thread, serves for the next one."""
_PAGES_OF_A_THREAD: Final = 256 << 10
_MARGIN_BYTES: Final = 1 << 20
_SMALL_DISK_PAGES: Final = 16384
_FILLER: Final = ".kvplug-filler"
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_CLONE_NEWNS: Final = 0x00020000
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where Linux has it
_SMALL_TEMP: Final = f"{_SHARED_MEMORY}/{_FILLER}-tmp"


@attrs.frozen
class Limit:
    """One of the limits of this module."""

    name: str
    resources: frozenset[str]
    """The resources that an error may name, one of ``ResourceExhaustedError.resource``."""
    begin: Callable[[int], AbstractContextManager[None]]
    """``with limit.begin(n):`` n more are available."""
    prepare: Callable[[], str] = lambda: ""
    """Once in a process, before anything is made. Returns why the limit cannot be set here; empty: it can."""


@contextlib.contextmanager
def descriptors(number: int) -> Iterator[None]:
    """``number`` more descriptors can be opened (``RLIMIT_NOFILE``)."""
    free = [os.dup(0) for _ in range(number + 1)]
    for fd in free:
        os.close(fd)
    with _limited(resource.RLIMIT_NOFILE, free[-1]):
        yield


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """``number`` more threads can be started with :mod:`threading`."""
    started = itertools.count()
    with _refusing_threads(lambda: next(started) >= number):
        yield


@contextlib.contextmanager
def _refusing_threads(is_refused: Callable[[], bool]) -> Iterator[None]:
    start = threading.Thread.start

    def start_or_refuse(thread: threading.Thread) -> None:
        if is_refused():
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", start_or_refuse):
        yield


@contextlib.contextmanager
def memory(number: int) -> Iterator[None]:
    """The process gets so many times :data:`MEMORY_STEP`: 0, 1, 2, 4, 8, ..., and a little more
    (``RLIMIT_AS``).

    Python and the C library have some free memory for small objects left, see :func:`reserve_memory`. Large
    tensors and the stacks of threads do not fit into that.
    """
    size = kernel_bytes("self/status", "VmSize")
    limited = _limited(resource.RLIMIT_AS, size + _MARGIN_BYTES + pages(number) * MEMORY_STEP)
    with limited, _refusing_threads(_has_no_room_for_a_thread):
        yield


def _has_no_room_for_a_thread() -> bool:
    """A thread of Python needs some pages besides its stack. Without them it dies silently, and
    ``start`` waits for it for ever."""
    try:
        mmap.mmap(-1, _STACK_BYTES + _PAGES_OF_A_THREAD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False


def pages(number: int) -> int:
    """0, 1, 2, 4, 8, ...: files are large, and what happens does not depend on each page."""
    return 1 << number >> 1


@contextlib.contextmanager
def file_size(number: int) -> Iterator[None]:
    """No file grows beyond so many :func:`pages`, and no shared memory without a name (``RLIMIT_FSIZE``)."""
    with _limited(resource.RLIMIT_FSIZE, pages(number) * PAGE):
        yield


@contextlib.contextmanager
def disk(number: int) -> Iterator[None]:
    """So many more :func:`pages` fit into what :func:`mount_small_disk` has mounted."""
    filler = f"{_SHARED_MEMORY}/{_FILLER}"
    with open(filler, "wb") as f:
        for patience in range(100, -1, -1):
            free = os.statvfs(_SHARED_MEMORY).f_bfree
            try:
                os.posix_fallocate(f.fileno(), 0, max(1, free - pages(number)) * PAGE)
                break
            except OSError:  # a thread of an earlier attempt took some meanwhile
                if not patience:
                    raise
                time.sleep(0.01)
    try:
        yield
    finally:
        os.unlink(filler)


_reserve: Final[list[object]] = []


def reserve_memory() -> str:
    """Have Python and the C library keep free memory for small objects. They would be refused next, which no
    program outlives, and no program can be judged by. Threads get small stacks, so that what they allocate is
    refused, and not only they."""
    if not _reserve:
        threading.stack_size(_STACK_BYTES)
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
        small = [bytes(400) for _ in range(_RESERVE_BYTES // 512)]  # from Python's own arenas
        _reserve.append(small[::500])  # one of each arena at least, so that it is not given back
        large = [bytes(60_000) for _ in range(_RESERVE_BYTES // 60_000)]  # from the C library's heap
        _reserve.append(large[::8])  # between the others, so that they make no large block together
        _reserve.append(bytes(60_000))  # above the others, so that the heap does not shrink
        del small, large
    return ""


def mount_small_disk() -> str:
    """Give this thread, and those that it starts, a small file system for /dev/shm and temporary files, once.

    Returns why that is not possible here; empty if it is done.
    """
    if tempfile.tempdir == _SMALL_TEMP:
        return ""
    size = f"size={_SMALL_DISK_PAGES * PAGE}".encode()
    try:
        libc_call("unshare", _CLONE_NEWNS)
        libc_call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        libc_call("mount", b"none", _SHARED_MEMORY.encode(), b"tmpfs", 0, size)
    except OSError as e:
        return f"this process cannot mount a small file system: {e.strerror}"
    os.mkdir(_SMALL_TEMP)
    tempfile.tempdir = _SMALL_TEMP
    return ""


def libc_call(function: str, *args: Any) -> None:
    """Call a function of the C library that returns 0.

    Raises:
        OSError: it fails; the error names the call.
    """
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}{args}: {os.strerror(number)}")


LIMITS: Final = {
    limit.name: limit
    for limit in (
        Limit("descriptors", frozenset({"descriptors"}), descriptors),
        Limit("threads", frozenset({"threads"}), threads),
        # A thread needs addresses for its stack.
        Limit("memory", frozenset({"memory", "threads"}), memory, reserve_memory),
        # Memory in a file without a name is memory to a caller that asked for memory.
        Limit("file size", frozenset({"space", "memory"}), file_size),
        Limit("disk", frozenset({"space", "memory"}), disk, mount_small_disk),
    )
}
"""All limits by name."""


@contextlib.contextmanager
def _limited(which: int, soft: int) -> Iterator[None]:
    before, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (before, hard))
