"""Descriptors, threads, memory or space run out at each step of making, using and closing an object (ALL-9).

In a forked child the n-th acquisition fails, and all later ones, until the limit is lifted: see
:mod:`kvplug_testing.limits`. Then the step that failed is tried again, with the same objects.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import faulthandler
import functools
import gc
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Final

import attrs
import pytest

from kvplug import KvplugError, ResourceExhaustedError
from kvplug_testing import peers
from kvplug_testing.contract.base import Contract, law
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.limits import LIMITS, Limit, mount_small_disk

MOST: Final = 400
"""An object that needs more than this is not judged beyond it."""
_ENOUGH: Final = 3
"""So many numbers in a row without an error show that nothing runs out any more."""
_LATER: Final = 2
"""The numbers below this are tried at steps after the first."""
SHORT_S: Final = 1.0
"""The timeout of calls while a resource is limited: a peer in the same process may be the one that fails."""
LONG_S: Final = 15.0
"""Their timeout otherwise, and in a second look at a call that only ran out of time."""
BLOCKED: Final = "a call is still blocked"
_SHOWN: Final = 5
"""The most faults that a failure lists."""
_LAST_WORDS: Final = 4000
"""Characters of the child's log that a failure shows."""
CHILD_S: Final = 240.0
_WORKERS: Final = 4


class ResultError(KvplugError):
    """For a step whose calls say by a result, and not by an error, that something could not be had."""


class EndedError(ResultError):
    """For a step whose calls say by a result that the object has ended for good."""


class Attempt(abc.ABC):
    """An object that is made, used and closed in steps.

    A step may be called again after it has raised, and goes on with what it has made. So it must not make
    anything twice, and not begin anything of a later step.
    """

    timeout_s: float = LONG_S
    """The timeout of every call that a step makes; changed from outside."""
    unlimited: ClassVar[int] = 0
    """So many steps at the beginning make what is not judged."""

    @property
    @abc.abstractmethod
    def steps(self) -> Sequence[Callable[[], None]]:
        """The steps, in order."""

    @abc.abstractmethod
    def end(self) -> None:
        """Release everything at once, whatever there is. Raises nothing."""

    def may_break(self, step: int) -> bool:
        """Whether its law lets the object be broken after that step has raised; it says so in the next try.
        Then a new one must work. By default it must go on itself.
        """
        return False

    def check(self) -> None:  # noqa: B027 - not every object is received from
        """After the last step: raise AssertionError if what was received is wrong."""


@attrs.frozen
class _Failure:
    """The errors of one step. Not the exceptions themselves: they keep alive what they have seen."""

    step: int
    what: str
    kinds: frozenset[str]
    """The kinds of errors, see :func:`_kind`."""
    names: frozenset[str]
    """The resources that they name."""

    @property
    def says_broken(self) -> bool:
        """Whether they say that the object has ended, for which nothing else is a reason."""
        excuses = ({"late"}, {"result"}, {"result", "ended"})
        return not (self.kinds in excuses or {"named", "foreign"} & self.kinds)


class Exhaustion(Contract):
    """Each suite has a subclass, which says what is attempted."""

    @property
    def running_out_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.forked_processes or ("" if Path("/proc/self/fd").exists() else "this needs Linux's /proc")

    def attempt(self) -> Attempt:
        """A new attempt with this suite's subject. Makes nothing that needs a resource."""
        raise NotImplementedError

    @law("ALL-9", level="long", needs="running_out_processes", timeout_s=CHILD_S)
    @pytest.mark.parametrize("limit", LIMITS)
    def test_each_thing_that_is_needed_runs_out_in_turn(self, limit: str) -> None:
        child = self.start_forked(f"{__name__}:run_out", self.suite_ref(), limit, timeout_s=CHILD_S)
        unfit, faults = child.result(CHILD_S)
        if unfit:
            pytest.skip(unfit)
        assert not faults, "\n".join([*faults, child.stderr[-_LAST_WORDS:]])


def run_out(parent: peers.Parent, suite_ref: dict[str, Any], limit: str) -> tuple[str, list[str]]:
    """In a child: judge the suite's subject. Returns why it cannot be judged, and the faults."""
    mount_small_disk()  # else other processes' shared memory is seen, and taken for what was left
    if unfit := LIMITS[limit].prepare():
        return unfit, []
    with ExitStack() as stack:
        suite = suite_from_ref(suite_ref)
        suite._stack = stack
        suite.warm_up()
        with contextlib.suppress(ImportError):
            import torch

            torch.set_num_threads(1)  # those of torch are not judged, and it cannot do without them
        for _ in range(2):  # these make what a process makes once, and keeps
            if failure := _whole(suite):
                return "", [f"without a limit: {failure.what}"]
        return "", _Trial(suite, LIMITS[limit]).faults()


class _Trial:
    """All attempts with one subject under one limit.

    All that is needed runs out from the first step on. Later ones begin with nothing left, or one.
    """

    def __init__(self, suite: Any, limit: Limit) -> None:
        self._suite = suite
        self._limit = limit
        self._unrefused = 0
        """The attempts in a row that were refused nothing."""

    def faults(self) -> list[str]:
        """What is wrong, at most some of it."""
        found: list[str] = []
        num_steps, unlimited = len(self._suite.attempt().steps), self._suite.attempt().unlimited
        for first in range(unlimited, num_steps):
            self._unrefused = 0
            for number in range(MOST if first == unlimited else _LATER):
                found += self._one(first, number)
                if len(found) >= _SHOWN or any(BLOCKED in each for each in found):
                    return found
                if self._unrefused >= _ENOUGH:
                    break
        return found

    def _one(self, first: int, number: int) -> list[str]:
        """Begin the limit at step ``first``, where ``number`` more can be had."""
        before, mapped = peers.Resources.of(), shared_mappings()
        found = self._try(first, number, SHORT_S)
        if found is not None and found[0].kinds == {"late"}:
            found = self._try(first, number, LONG_S)  # a busy machine, perhaps
        self._unrefused = 0 if found else self._unrefused + 1
        faults = []
        if found is not None:
            failure, again = found
            if "foreign" in failure.kinds:
                faults.append(f"it raised what is no error of kvplug: {failure.what}")
            elif not (failure.kinds <= {"result", "ended"} or failure.names & self._limit.resources):
                faults.append(f"no error named what ran out: {failure.what}")
            if again:
                faults.append(f"the very next try without the limit failed: {again}")
        if left := _left(before, mapped, self._suite.settle_s):
            faults.append(f"left behind: {left}")
        where = f"{self._limit.name}, {number} left from {_name(self._suite.attempt(), first)} on"
        return [f"{where}: {fault}" for fault in faults]

    def _try(self, first: int, number: int, timeout_s: float) -> tuple[_Failure, str] | None:
        """``None``: nothing failed. Else the failure, and why the next try without the limit failed too."""
        attempt = self._suite.attempt()
        try:
            if failure := _run(attempt, range(first)):
                return failure, failure.what
            attempt.timeout_s = timeout_s
            with self._limit.begin(number):
                failure = _run(attempt, range(first, len(attempt.steps)))
            attempt.timeout_s = LONG_S
            again = None
            if failure is not None:
                again = _run(attempt, range(failure.step, len(attempt.steps)))
            if again is None:
                attempt.check()
            if failure is None:
                return None
            if again is None:
                return failure, ""
            # A thread of the object may have met the shortage: then only the next call can say so.
            if not (attempt.may_break(failure.step) and (again.says_broken or again.names)):
                return failure, again.what
        finally:
            attempt.end()
        again = _whole(self._suite)
        return failure, "" if again is None else again.what


def _whole(suite: Any) -> _Failure | None:
    """An attempt without a limit."""
    attempt = suite.attempt()
    try:
        failure = _run(attempt, range(len(attempt.steps)))
        if failure is None:
            attempt.check()
        return failure
    finally:
        attempt.end()


def _run(attempt: Attempt, steps: range) -> _Failure | None:
    """Run these steps. Returns the errors of the first that fails."""
    for step in steps:
        try:
            attempt.steps[step]()
        except Exception as e:
            return _failure(attempt, step, e)
    return None


def _failure(attempt: Attempt, step: int, error: Exception) -> _Failure:
    errors = list(error.exceptions) if isinstance(error, ExceptionGroup) else [error]
    said = "; ".join(f"{type(each).__name__}: {each}" for each in errors)
    return _Failure(
        step=step,
        what=f"{_name(attempt, step)}: {said}"[:2000],
        kinds=frozenset(map(_kind, errors)),
        names=frozenset(each.resource for each in errors if isinstance(each, ResourceExhaustedError)),
    )


def _kind(error: Exception) -> str:
    match error:
        case EndedError():
            return "ended"
        case ResultError():
            return "result"
        case ResourceExhaustedError():
            return "named"
        case KvplugError():
            return "late" if isinstance(error, TimeoutError) else "broken"
    return "foreign"


def _name(attempt: Attempt, step: int) -> str:
    return attempt.steps[step].__name__.strip("_")


def _left(before: peers.Resources, mapped: collections.Counter[str], within: float) -> str:
    """What the process holds beyond ``before``, once it had time to release it."""
    limit = time.monotonic() + within
    while True:
        words = [peers.Resources.of().beyond(before)]
        if more := shared_mappings() - mapped:
            words.append(f"mappings: {', '.join(sorted(more))}")
        left = "; ".join(word for word in words if word)
        if not left:
            return ""
        if time.monotonic() > limit:
            faulthandler.dump_traceback(all_threads=True)
            return left
        time.sleep(0.005)
        gc.collect()


def shared_mappings() -> collections.Counter[str]:
    """The shared memory that this process has mapped, by name."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    fields = [line.split(maxsplit=5) for line in lines]
    return collections.Counter(each[5] for each in fields if len(each) == 6 and each[1].endswith("s"))


# -- calls at the same time ------------------------------------------------------------------------


def together(*calls: Callable[[], Any], within: float) -> None:
    """Make these calls at the same time, in threads that exist already: more might be refused.

    Raises:
        ExceptionGroup: the errors of all that raised, or that did not end within so many seconds.
    """
    outcomes = [_workers().submit(call) for call in calls]
    limit = time.monotonic() + within
    errors = []
    for outcome in outcomes:
        try:
            error = outcome.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            faulthandler.dump_traceback(all_threads=True)  # to a descriptor that is there already
            error = AssertionError(f"{BLOCKED} after {within} s")
        if error is not None:
            errors.append(error)
    if errors:
        raise ExceptionGroup("calls at the same time", errors)


class _Workers:
    """Threads of this process that wait for calls."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]
        self._calls = queue.SimpleQueue()
        for number in range(_WORKERS):
            name = f"kvplug_testing worker {number}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        """Where its error comes, or ``None``."""
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((call, outcome))
        return outcome

    def _work(self) -> None:
        while True:
            call, outcome = self._calls.get()
            try:
                call()
                outcome.put(None)
            except BaseException as e:
                outcome.put(e)
            del call, outcome


@functools.cache
def _workers() -> _Workers:
    return _Workers()


def let_go(*ends: Callable[[], Any]) -> None:
    """For :meth:`Attempt.end`: call each of them, whatever it raises."""
    for end in ends:
        with contextlib.suppress(Exception):
            end()
