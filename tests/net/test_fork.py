"""What is closed in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from kvplug.net.fork import close_after_fork, close_fd_after_fork
from kvplug_testing.contract.forked_child import in_forked_child


class _Thing:
    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.closed = False
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        if self._error is not None:
            raise self._error
        self.closed = True


def test_what_fails_to_close_in_a_forked_child_is_logged_and_the_rest_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    things = [_Thing(), _Thing(OSError("it is stuck")), _Thing()]

    def look() -> str:
        return f"{[each.closed for each in things]} {caplog.text}"

    found = in_forked_child(look)
    assert found.startswith("[True, False, True] ")
    assert "closing '_Thing' in a forked child failed" in found and "it is stuck" in found


class _Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rlock = threading.RLock()
        self.changed = threading.Condition(self.rlock)
        self.event = threading.Event()
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        with self.lock, self.rlock, self.changed:
            self.event.set()


def test_locks_that_a_thread_of_the_parent_holds_are_free_in_a_forked_child() -> None:
    locked = _Locked()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with locked.lock, locked.changed:
            held.set()
            over.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(20)
    try:
        assert in_forked_child(lambda: str(locked.event.wait(0) and locked.lock.acquire(timeout=0))) == "True"
    finally:
        over.set()
        holder.join(20)
    assert not locked.event.is_set() and not locked.lock.locked()


class _Slotted:
    __slots__ = ("__weakref__", "closed")

    def __init__(self) -> None:
        self.closed = False
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self.closed = True


def test_what_has_no_dict_is_closed_in_a_forked_child_too() -> None:
    slotted = _Slotted()
    assert in_forked_child(lambda: str(slotted.closed)) == "True"


def memory() -> int:
    return os.memfd_create("test of forks")


def process() -> int:
    return os.pidfd_open(os.getpid())


OTHERS = [memory, lambda: os.pidfd_open(os.getppid()), lambda: os.eventfd(0)]


def is_open(fd: int) -> str:
    return str(os.path.exists(f"/proc/self/fd/{fd}"))


@pytest.mark.parametrize("make", [memory, process])
def test_memory_and_a_process_are_closed_in_a_forked_child(make: Callable[[], int]) -> None:
    fd = make()
    close_fd_after_fork(fd)
    assert in_forked_child(lambda: is_open(fd)) == "False"
    os.close(fd)


@pytest.mark.parametrize("make", [memory, process])
@pytest.mark.parametrize("other", OTHERS, ids=["memory", "process", "counter"])
def test_what_has_the_number_of_a_closed_descriptor_stays_open(
    make: Callable[[], int], other: Callable[[], int]
) -> None:
    fd, following = make(), other()
    close_fd_after_fork(fd)
    os.dup2(following, fd)
    assert in_forked_child(lambda: is_open(fd)) == "True"
    os.close(fd)
    os.close(following)
