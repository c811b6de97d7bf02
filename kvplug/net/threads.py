"""Stop kvplug's threads before the interpreter exits.

When the interpreter exits, Python ends each daemon thread where that thread next asks for the interpreter's
lock. A thread that asks while it returns from a C++ library (every method of a tensor calls one) is ended
inside C++ frames that do not allow this. The whole process then dies of SIGABRT ("terminate called without an
active exception") instead of returning its exit code. Non-daemon threads do not help: Python waits for them
without a limit, even for one that waits for a peer.

So each of kvplug's threads is a :class:`BackgroundThread` with a function that ends it, and objects that are
called in the program's threads register with :meth:`ExitGuard.register`. At exit, after Python has waited for
the program's own threads, kvplug ends these threads and objects, and waits for them for :data:`EXIT_S` in
total. A thread that still runs after that usually waits for a peer. Python may stop it there, since its stack
has only C frames. A thread of the program whose call fails at exit would return to the program and drop
tensors, which calls torch again; :meth:`ExitGuard.hold` holds it back. A forked child waits only for threads
that it started itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from kvplug.net.affinity import set_own_cpus
from kvplug.net.deadline import Deadline
from kvplug.net.fork import alive

logger = logging.getLogger(__name__)

EXIT_S: Final = 2.0
"""The longest time that an exiting program waits for threads inside kvplug."""
_LOOK_S: Final = 0.001
_HELD_S: Final = 10.0
"""How long a thread is held. Bounds the exit of a program whose atexit function joins that thread."""

Stop = Callable[[], object]


class BackgroundThread(threading.Thread):
    """A thread of kvplug. It runs on the CPUs that the config names and ends when the program exits."""

    def __init__(
        self, target: Callable[..., object], *, name: str, stop: Stop, args: Iterable[Any] = ()
    ) -> None:
        """``stop`` makes ``target`` return soon, whatever ``target`` waits for, and does not itself wait.

        ``stop`` is called when the program exits: in another thread, perhaps more than once, and perhaps
        after the owner of the thread was closed.
        """
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._ended_by: Stop | None = stop

    def start(self) -> None:
        """Raises RuntimeError: no more threads can be started now, or the program is exiting."""
        if _has_left:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        if self._ended_by is not None:
            _running[self] = self._ended_by
        try:
            super().start()
        except Exception:  # not after Ctrl-C: the thread may have started
            self._forget()
            raise

    def run(self) -> None:
        """Run the thread's body; called by :meth:`start`. Pass ``target`` rather than override this."""
        try:
            set_own_cpus()
            super().run()
        finally:
            self._forget()

    def _forget(self) -> None:
        _running.pop(self, None)
        self._ended_by = None  # it refers to the owner, which refers to the thread


class CalledByProgram(Protocol):
    """An object whose calls may be inside a C++ library, in a thread of the program."""

    def _end_at_exit(self) -> object:
        """Make current and later calls raise ``ClosedError`` soon. Does not wait; idempotent."""

    def _is_in_use(self) -> bool:
        """Whether a thread is inside a call."""


_running: Final[dict[BackgroundThread, Stop]] = {}
_called: Final[weakref.WeakValueDictionary[int, CalledByProgram]] = weakref.WeakValueDictionary()
_is_leaving = _has_left = False


class ExitGuard:
    """Ends, at exit, the objects that are called in threads of the program."""

    @staticmethod
    def register(thing: CalledByProgram) -> None:
        """End ``thing`` at exit if it is still alive, and wait until no thread is inside one of its calls."""
        _called[id(thing)] = thing

    @staticmethod
    def is_leaving() -> bool:
        """Whether the program is exiting. Python 3.12 starts no more threads then."""
        return _is_leaving

    @staticmethod
    def hold() -> None:
        """Hold back a thread whose call of a registered object failed at exit; the call no longer counts as
        in use.

        Returns at once, except in a thread of the program that Python is about to stop. There it waits for
        Python to stop the thread. Python 3.14 holds such threads in the same way.
        """
        if _is_leaving:
            thread = threading.current_thread()
            if thread is not threading.main_thread() and not isinstance(thread, BackgroundThread):
                time.sleep(_HELD_S)


@atexit.register
def _leave() -> None:
    global _is_leaving, _has_left
    _is_leaving = True
    deadline = Deadline.after(EXIT_S)
    ended: dict[int, object] = {}
    while (_is_busy() or alive(_called)) and not deadline.expired:
        # The wait is short, so a second Ctrl-C or another signal whose handler raises does not end it.
        # Everything happens in this thread, since Python 3.12 starts no more threads by now.
        with contextlib.suppress(BaseException), _interrupted_at(deadline):
            _end_all(deadline, ended)
            break
    if _is_busy():
        logger.debug("still inside kvplug at exit: %s", [thread.name for thread in list(_running)])
    _has_left = True


def _end_all(deadline: Deadline, ended: dict[int, object]) -> None:
    """End every thread and object that is not in ``ended``, and wait until none is busy.

    ``ended`` maps the identity of each object to the object. It keeps the object alive, so that no other
    object can get the same identity. A call after an interruption resumes with the object that was being
    ended.
    """
    while not deadline.expired:
        # Objects first: one whose thread ended before it was closed would report a failure.
        ends: list[tuple[object, Stop]] = [(thing, thing._end_at_exit) for thing in alive(_called)]
        ends += _running.items()
        for thing, end in ends:
            if id(thing) not in ended:  # others may have been made meanwhile
                try:
                    end()
                except Exception:
                    logger.exception("a kvplug thread could not be ended at exit")
                ended[id(thing)] = thing
        if not _is_busy():
            return
        time.sleep(_LOOK_S)


class _LateError(BaseException):
    """The time is up."""


@contextlib.contextmanager
def _interrupted_at(deadline: Deadline) -> Iterator[None]:
    """Raise :class:`_LateError` at the deadline, since a stop function may wait for a lock that is never
    released."""

    def interrupt(*_: object) -> None:
        raise _LateError

    try:
        before = signal.signal(signal.SIGALRM, interrupt)
    except ValueError:  # this is not the main thread
        yield
        return
    timer = signal.setitimer(signal.ITIMER_REAL, max(_LOOK_S, deadline.remaining() or 0.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def _is_busy() -> bool:
    return bool(_running) or any(thing._is_in_use() for thing in alive(_called))


def _in_child() -> None:
    _running.clear()
    _called.clear()


os.register_at_fork(after_in_child=_in_child)
