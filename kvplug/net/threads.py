"""Threads that are inside kvplug when the program leaves: they leave first.

At its end Python stops daemon threads: each one ends where it next asks for the interpreter's lock. A thread
that does so on its way back from a library in C++ (every method of a tensor is such a call) ends within
frames that do not allow it, and the whole process ends by SIGABRT ("terminate called without an active
exception") instead of with its exit code. Threads that are not daemons are no remedy: Python waits for them
without a limit, also for one that waits for a peer.

So kvplug's threads are :class:`BackgroundThread`, each with a function that ends it, and objects whose calls
are made in threads of the program register with :meth:`ExitGuard.register`. When the program leaves, after
Python has waited for the program's own threads, all of them are ended, and waited for, for :data:`EXIT_S` in
total.
A thread that is still there then usually waits for a peer, and Python may stop it: only frames of C are on
its stack. A thread of the program whose call has failed so would go back into the program, and drop tensors
there, which is a call of torch again: :meth:`ExitGuard.hold` keeps it. In a forked child nothing is waited
for but what the child itself has started.
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
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from kvplug.net.affinity import set_own_cpus, thread_cpus
from kvplug.net.deadline import Deadline
from kvplug.net.fork import alive

logger = logging.getLogger(__name__)

EXIT_S: Final = 2.0
"""How long a program that leaves waits for threads inside kvplug, at most."""
_LOOK_S: Final = 0.001
_HELD_S: Final = 10.0
"""For a program whose own function at exit waits for its thread without a limit: it ends, if late."""

Stop = Callable[[], object]


class BackgroundThread(threading.Thread):
    """A thread of kvplug's: it runs on the CPUs that the config names, and ends when the program leaves."""

    def __init__(
        self, target: Callable[..., object], *, name: str, stop: Stop, args: Iterable[Any] = ()
    ) -> None:
        """``stop`` makes ``target`` return soon, whatever it waits for. It does not wait itself.

        It is called when the program leaves: in another thread, perhaps more than once, and perhaps after the
        owner of the thread was closed.
        """
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._ended_by: Stop | None = stop

    @staticmethod
    def affinity() -> AbstractContextManager[None]:
        """A block in which threads that a library starts use the CPUs of kvplug's threads.

        They inherit them from the calling thread, which has its own ones again afterwards.
        """
        return thread_cpus()

    def start(self) -> None:
        """Raises RuntimeError: there can be no more threads now, or the program has left."""
        if _has_left:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        if self._ended_by is not None:
            _running[self] = self._ended_by
        try:
            super().start()
        except Exception:  # not after Ctrl-C: it may have started
            self._forget()
            raise

    def run(self) -> None:
        """The thread's body; called by :meth:`start`. Give ``target`` instead of overriding it."""
        try:
            set_own_cpus()
            super().run()
        finally:
            self._forget()

    def _forget(self) -> None:
        _running.pop(self, None)
        self._ended_by = None  # it refers to the owner, which refers to the thread


class CalledByProgram(Protocol):
    """An object whose calls may be inside a library in C++, in a thread of the program."""

    def _end_at_exit(self) -> object:
        """Make calls under way, and later ones, raise ``ClosedError`` soon. It does not wait; idempotent."""

    def _is_in_use(self) -> bool:
        """Whether a thread is inside a call."""


_running: Final[dict[BackgroundThread, Stop]] = {}
_called: Final[weakref.WeakValueDictionary[int, CalledByProgram]] = weakref.WeakValueDictionary()
_is_leaving = _has_left = False


class ExitGuard:
    """What the end of the program does to objects whose calls are made in threads of the program."""

    @staticmethod
    def register(thing: CalledByProgram) -> None:
        """When the program leaves, end ``thing`` if it still lives, and wait until no thread is inside a
        call."""
        _called[id(thing)] = thing

    @staticmethod
    def is_leaving() -> bool:
        """Whether the program is leaving. From then on Python 3.12 starts no more threads."""
        return _is_leaving

    @staticmethod
    def hold() -> None:
        """For a call of an object that ends at exit, when it has failed: it no longer counts as in use.

        Returns at once, except in a thread of the program's that Python is about to stop: there it waits, so
        that the thread is stopped here. Python 3.14 keeps such threads in the same way.
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
        # A second Ctrl-C, or another signal whose handler raises, does not end the wait: it is short. It all
        # happens in this thread, since Python 3.12 starts no more threads by now.
        with contextlib.suppress(BaseException), _interrupted_at(deadline):
            _end_all(deadline, ended)
            break
    if _is_busy():
        logger.debug("still inside kvplug at exit: %s", [thread.name for thread in list(_running)])
    _has_left = True


def _end_all(deadline: Deadline, ended: dict[int, object]) -> None:
    """``ended``: what need not be ended again, by identity, and kept, or the identity might become another's.

    After an interruption it goes on with what it was ending.
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
                    logger.exception("a thread of kvplug could not be ended at exit")
                ended[id(thing)] = thing
        if not _is_busy():
            return
        time.sleep(_LOOK_S)


class _LateError(BaseException):
    """The time is over."""


@contextlib.contextmanager
def _interrupted_at(deadline: Deadline) -> Iterator[None]:
    """Raise :class:`_LateError` at the deadline: an end may wait for a lock whose owner never comes back."""

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
