"""One kvplug error for a resource that ran out: descriptors, threads, memory or space.

The system reports exhaustion in many forms: ``OSError`` with one of a dozen numbers, ``MemoryError``,
``RuntimeError: can't start new thread``, a sentence from a C++ library. Only this module recognises them. A
public call that may need a resource runs inside :class:`NamedExhaustion`. Code that gives a caught
``OSError`` another meaning, such as "the peer is gone", calls :meth:`NamedExhaustion.check` first.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource  # imported now, since an import itself needs a descriptor
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from kvplug.errors import BusyError, CancelledError, ClosedError, KvplugError, ResourceExhaustedError
from kvplug.net.threads import BackgroundThread

DESCRIPTORS: Final = "descriptors"
THREADS: Final = "threads"
MEMORY: Final = "memory"
SPACE: Final = "space"

_NUMBERS: Final = {
    errno.EMFILE: DESCRIPTORS,
    errno.ENFILE: DESCRIPTORS,
    errno.ETOOMANYREFS: DESCRIPTORS,
    errno.ENOMEM: MEMORY,
    errno.ENOBUFS: MEMORY,
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EFBIG: SPACE,
}
_SENTENCES: Final = (
    ("can't start new thread", THREADS, None),
    (os.strerror(errno.EAGAIN), THREADS, None),  # raised by std::thread
    *((os.strerror(number), what, number) for number, what in _NUMBERS.items()),
    ("can't allocate memory", MEMORY, errno.ENOMEM),
    ("not enough memory", MEMORY, errno.ENOMEM),
    ("out of memory", MEMORY, None),  # on a device
    ("bad_alloc", MEMORY, errno.ENOMEM),
)
"""Messages of libraries that report no error number: torch, gloo, the loader of shared libraries."""
_STACK_BYTES: Final = 8 << 20
"""Stack size of a thread that a library starts, unless ``RLIMIT_STACK`` sets another."""
_ADDRESSES_ALONE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""Flags of a mapping that is never used: includes MAP_NORESERVE."""
_KEPT: Final = (ClosedError, CancelledError, BusyError)
"""Errors that are never converted, whatever their cause."""
_LONGEST_CHAIN: Final = 16


class NamedExhaustion(contextlib.ContextDecorator):
    """``with NamedExhaustion("connecting a pipe"):`` wraps code that may need a system resource.

    If an error in the block, or one of its causes, reports that a resource ran out, a
    :class:`ResourceExhaustedError` is raised from it. Any other error passes unchanged. Several threads may
    enter one object at once, and it can decorate a function.

    >>> with NamedExhaustion("connecting a pipe"):
    ...     raise RuntimeError("can't start new thread")
    Traceback (most recent call last):
        ...
    kvplug.errors.ResourceExhaustedError: connecting a pipe: this process can start no more threads ...
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, ResourceExhaustedError):
            self.check(error, self._doing)

    @staticmethod
    def of(error: BaseException, doing: str = "") -> ResourceExhaustedError | None:
        """Return a :class:`ResourceExhaustedError` if ``error`` or one of its causes reports one, else
        ``None``.

        Returns ``error`` itself if it is one already. Otherwise ``doing``, such as "connecting a pipe",
        begins the new error's text.

        >>> NamedExhaustion.of(OSError(errno.EMFILE, "Too many open files"), "connecting a pipe")
        ResourceExhaustedError('connecting a pipe: this process has no free descriptor ...')
        >>> NamedExhaustion.of(ConnectionResetError("the peer hung up"))
        """
        if isinstance(error, ResourceExhaustedError):
            return error
        if isinstance(error, _KEPT):
            return None
        for each in _chain(error):
            found = _recognised(each)
            if found is None:
                continue
            what, number = found
            named = isinstance(each, ResourceExhaustedError)
            explained = str(each) if named else _explained(what, number)
            if not named and number is None:
                explained += f" ({type(each).__name__}: {each})"
            if isinstance(error, KvplugError):
                text = str(error) if explained in str(error) else f"{error}; {explained}"
            else:
                text = f"{doing}: {explained}" if doing else explained
            return ResourceExhaustedError(text, resource=what, errno=number)
        return None

    @staticmethod
    def check(error: BaseException, doing: str) -> None:
        """Raise if ``error`` reports that a resource ran out. Handlers call this before giving it another
        meaning.

        Raises:
            ResourceExhaustedError: the error that :meth:`of` returns.
        """
        found = NamedExhaustion.of(error, doing)
        if found is error:
            raise error
        if found is not None:
            raise found from error

    @staticmethod
    def ensure_available(doing: str, *, descriptors: int = 0, threads: int = 0) -> None:
        """Check that this many descriptors and threads are available. For libraries that end the process if
        they are not: gloo, ZeroMQ.

        Raises:
            ResourceExhaustedError: they are not available.
        """
        over = threading.Event()
        with contextlib.ExitStack() as undo, NamedExhaustion(doing):
            for _ in range(descriptors):
                undo.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            if threads:
                stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
                nbytes = threads * (stack if stack > 0 else _STACK_BYTES)  # -1: unlimited
                mmap.mmap(-1, nbytes, flags=_ADDRESSES_ALONE).close()
            for _ in range(threads):
                thread = BackgroundThread(over.wait, name="kvplug ensures threads", stop=over.set)
                thread.start()
                undo.callback(thread.join)
                undo.callback(over.set)  # undone first: callbacks run in reverse order


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its explicit causes."""
    each: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if each is None:
            return
        yield each
        each = each.__cause__


def _recognised(error: BaseException) -> tuple[str, int | None] | None:
    """Return the resource that ran out according to ``error``, and the system's error number."""
    if isinstance(error, ResourceExhaustedError):
        return error.resource, error.errno
    if isinstance(error, KvplugError):
        return None
    if isinstance(error, MemoryError):
        return MEMORY, errno.ENOMEM
    number = getattr(error, "errno", None)  # ZeroMQ's errors have one too, though they are not OSErrors
    if isinstance(number, int) and type(error).__module__ != "ssl":  # ssl has its own numbers
        what = _NUMBERS.get(number)
        return None if what is None else (what, number)
    if isinstance(error, RuntimeError | ImportError | OSError):
        text = str(error).lower()
        for sentence, what, number in _SENTENCES:
            if sentence.lower() in text:
                return what, number
    return None


def _explained(what: str, number: int | None) -> str:
    """Explain what ran out, which limit applies, and what to do next."""
    match what, number:
        case (_, errno.ENFILE):
            return "this host has no free descriptor (fs.file-max)"
        case (_, errno.ETOOMANYREFS):
            return f"too many descriptors are in transit between processes{_limit('NOFILE')}; try again"
        case "descriptors", _:
            return (
                f"this process has no free descriptor{_limit('NOFILE')}; raise the limit (ulimit -n), or"
                " close unused files and connections"
            )
        case "threads", _:
            return (
                f"this process can start no more threads{_limit('NPROC', 'AS')}; raise the limit (ulimit -u,"
                " or pids.max of its cgroup), or end unused threads"
            )
        case (_, errno.EFBIG):
            return f"a file may not become so large{_limit('FSIZE')}; raise the limit (ulimit -f)"
        case (_, errno.EDQUOT):
            return "the quota of this user's files is used up; delete some files"
        case "space", _:
            return "no space is left on the file system; delete some files"
        case (_, errno.ENOBUFS):
            return "the kernel has no memory left for buffers; try again"
        case (_, None):
            return "there is not enough free memory on the device"
        case _:
            return f"there is not enough free memory{_limit('AS')}"


def _limit(*names: str) -> str:
    """Return those of the named limits that are set for this process: " (RLIMIT_NOFILE is 1024)"."""
    limits = []
    for name in names:
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        if soft != resource.RLIM_INFINITY:
            limits.append(f"RLIMIT_{name} is {soft}")
    return f" ({', '.join(limits)})" if limits else ""
