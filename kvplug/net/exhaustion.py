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
from types import TracebackType
from typing import Final

from kvplug.errors import BusyError, CancelledError, ClosedError, KvplugError, ResourceExhaustedError

DESCRIPTORS: Final = "descriptors"
THREADS: Final = "threads"
MEMORY: Final = "memory"
SPACE: Final = "space"

_EXPLAINED: Final = {
    DESCRIPTORS: (
        "there is no free descriptor",
        ("NOFILE",),
        "raise the limit (ulimit -n), or close unused files and connections",
    ),
    THREADS: (
        "this process can start no more threads",
        ("NPROC", "AS"),
        "raise the limit (ulimit -u, or pids.max of its cgroup), or end unused threads",
    ),
    MEMORY: ("there is not enough free memory", ("AS",), "use less, or raise the limit (ulimit -v)"),
    SPACE: ("there is no space for files", ("FSIZE",), "delete some files, or raise the limit (ulimit -f)"),
}
"""What ran out, the limits that may be the cause, and what to do next."""
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
"""Flags that only reserve addresses; 0x4000 is MAP_NORESERVE."""
_KEPT: Final = (ClosedError, CancelledError, BusyError)
"""Errors that are never converted, whatever their cause."""
_LONGEST_CHAIN: Final = 16


class NamedExhaustion(contextlib.ContextDecorator):
    """``with NamedExhaustion("connecting a pipe"):`` wraps code that may need a system resource.

    If an error in the block, or one of its causes, reports that a resource ran out, a
    :class:`ResourceExhaustedError` is raised from it. Any other error passes unchanged by default. If
    ``error`` is given, it replaces errors of the classes in ``of``; its text is ``doing`` and the reason.
    Several threads may enter one object at once, and it can decorate a function.

    >>> with NamedExhaustion("connecting a pipe"):
    ...     raise RuntimeError("can't start new thread")
    Traceback (most recent call last):
        ...
    kvplug.errors.ResourceExhaustedError: connecting a pipe: this process can start no more ...
    >>> with NamedExhaustion("the secret cannot be read", KvplugError):
    ...     open("/no/such/file")
    Traceback (most recent call last):
        ...
    kvplug.errors.KvplugError: the secret cannot be read: No such file or directory
    """

    def __init__(
        self,
        doing: str,
        error: type[KvplugError] | None = None,
        of: tuple[type[Exception], ...] = (OSError,),
    ) -> None:
        self._doing = doing
        self._error = error
        self._of = of

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ResourceExhaustedError):
            return
        self.check(error, self._doing)
        if self._error is not None and isinstance(error, self._of) and not isinstance(error, KvplugError):
            raise self._error(f"{self._doing}: {getattr(error, 'strerror', None) or error}") from error

    @staticmethod
    def of(error: BaseException, doing: str = "") -> ResourceExhaustedError | None:
        """Return a :class:`ResourceExhaustedError` if ``error`` or one of its causes reports that a resource
        ran out, else ``None``.

        If ``error`` is already a :class:`ResourceExhaustedError`, returns ``error`` itself. Otherwise the new
        error's text begins with ``doing``, such as "connecting a pipe".

        >>> NamedExhaustion.of(OSError(errno.EMFILE, "Too many open files"), "connecting a pipe")
        ResourceExhaustedError('connecting a pipe: there is no free descriptor (Too many ...')
        >>> NamedExhaustion.of(ConnectionResetError("the peer hung up"))
        """
        if isinstance(error, ResourceExhaustedError):
            return error
        if isinstance(error, _KEPT):
            return None
        each: BaseException | None = error
        for _ in range(_LONGEST_CHAIN):
            if each is None:
                break
            if (found := _recognised(each)) is not None:
                what, number, explained = found
                if not isinstance(error, KvplugError):
                    text = f"{doing}: {explained}" if doing else explained
                else:
                    text = str(error) if explained in str(error) else f"{error}; {explained}"
                return ResourceExhaustedError(text, resource=what, errno=number)
            each = each.__cause__
        return None

    @staticmethod
    def check(error: BaseException, doing: str) -> None:
        """Raise if ``error`` reports that a resource ran out. Code that replaces a caught error with another
        one calls this first.

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
        """Check that this many descriptors and threads are available. Call this before calling a library that
        ends the process if it cannot get one, such as UCX.

        Raises:
            ResourceExhaustedError: they are not available.
        """
        from kvplug.net.threads import BackgroundThread  # here, since `kvplug list` needs no thread

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


def _recognised(error: BaseException) -> tuple[str, int | None, str] | None:
    """Return the resource that ran out according to ``error``, the system's error number, and an
    explanation."""
    if isinstance(error, ResourceExhaustedError):
        return error.resource, error.errno, str(error)
    if isinstance(error, KvplugError):
        return None
    if isinstance(error, MemoryError):
        return _explained(MEMORY, errno.ENOMEM, error)
    number = getattr(error, "errno", None)  # ZeroMQ's errors have one too, though they are not OSErrors
    if isinstance(number, int) and type(error).__module__ != "ssl":  # ssl has its own numbers
        return _explained(_NUMBERS[number], number, error) if number in _NUMBERS else None
    if isinstance(error, RuntimeError | ImportError | OSError):
        text = str(error).lower()
        for sentence, what, of_sentence in _SENTENCES:
            if sentence.lower() in text:
                return _explained(what, of_sentence, error)
    return None


def _explained(what: str, number: int | None, error: BaseException) -> tuple[str, int | None, str]:
    """Explain what ran out, with the system's or library's own words, the limits set, and what to do next."""
    lacking, limits, change = _EXPLAINED[what]
    details = [f"{type(error).__name__}: {error}" if number is None else os.strerror(number)]
    for name in limits:
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        if soft != resource.RLIM_INFINITY:
            details.append(f"RLIMIT_{name} is {soft}")
    return what, number, f"{lacking} ({'; '.join(details)}); {change}"
