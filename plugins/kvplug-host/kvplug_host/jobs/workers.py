"""The threads that copy, and the order of their work: tasks take turns, step by step.

So a request for a few pages is not held up by one for thousands, and several threads work on a request that
is alone."""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Callable

from kvplug.transport import BackgroundThread, Deadline

_log = logging.getLogger(__name__)


class Task(abc.ABC):
    """Work that consists of steps."""

    @abc.abstractmethod
    def next_step(self) -> int | None:
        """Begin another step: its number. ``None``: there is none now. Called under a lock: it must be
        quick."""

    @abc.abstractmethod
    def has_steps(self) -> bool:
        """Whether :meth:`next_step` would give one. Called under the same lock."""

    @abc.abstractmethod
    def run(self, step: int) -> None:
        """Do that step. Must not raise."""


class Workers:
    """Up to ``num_threads`` threads, which start when there is work for them."""

    def __init__(self, name: str, num_threads: int, stop: Callable[[], object]) -> None:
        """``stop``: ends the owner and its tasks, without waiting, when the program leaves."""
        self._name = name
        self._stop = stop
        self._num_threads = num_threads
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._tasks: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def add(self, task: Task) -> bool:
        """Do the steps of the task. Returns whether there is a thread for it."""
        with self._lock:
            if self._closed:
                return False
            self._tasks.append(task)
            if not self._idle and len(self._threads) < self._num_threads:
                self._start()
            if not self._threads:
                self._tasks.remove(task)
                return False
            self._changed.notify()
            return True

    def _start(self) -> None:
        """With the lock: one thread more."""
        number = len(self._threads)
        thread = BackgroundThread(self._run, name=f"kvplug-{self._name}-{number}", stop=self._stop)
        try:
            thread.start()
        except RuntimeError as e:
            _log.warning("the store %r needs another thread: %s", self._name, e)
            return
        self._threads.append(thread)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            task, step = taken
            try:
                task.run(step)
            except Exception:  # the thread serves other tasks, too
                _log.exception("a step of the store %r failed: a fault of kvplug", self._name)

    def _take(self) -> tuple[Task, int] | None:
        with self._lock:
            while True:
                while self._tasks:
                    task = self._tasks.popleft()
                    step = task.next_step()
                    if step is None:
                        continue
                    if task.has_steps():
                        self._tasks.append(task)
                    if self._tasks and self._idle:
                        self._changed.notify()
                    elif self._tasks and len(self._threads) < self._num_threads:
                        self._start()
                    return task, step
                if self._closed:
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1

    def close(self) -> None:
        """Finish what is queued, then end the threads. Does not wait. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def join(self, deadline: Deadline) -> None:
        """After :meth:`close`: wait for the threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())
