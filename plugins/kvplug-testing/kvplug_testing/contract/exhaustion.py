"""Descriptors, threads, memory or space run out at each step of making, using and closing an object (ALL-9).

In a forked child the n-th acquisition fails, and all later ones, until the limit is lifted: see
:mod:`kvplug_testing.limits`. Then the step that failed is tried again, with the same objects.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import gc
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import attrs
import pytest

from kvplug import KvplugError, ResourceExhaustedError
from kvplug_testing import peers
from kvplug_testing.contract.base import Contract, law
from kvplug_testing.contract.ends import End, Ends
from kvplug_testing.contract.forked_child import shared_mappings
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.limits import LIMITS, Limit, mount_small_disk

MOST: Final = 400
"""An object that needs more than this is not judged beyond it."""
_ENOUGH: Final = 3
"""So many numbers in a row without an error show that nothing runs out any more."""
_LATER: Final = 2
"""The numbers below this are tried at steps after the first."""
SHORT_S: Final = 0.3
"""The timeout of calls while a resource is limited: a peer in the same process may be the one that fails."""
LONG_S: Final = 15.0
"""Their timeout otherwise, and in a second look at a call that only ran out of time."""
BLOCKED: Final = "a call is still blocked"
_SHOWN: Final = 5
"""The most faults that a failure lists."""
_LAST_WORDS: Final = 4000
"""Characters of the child's log that a failure shows."""
CHILD_S: Final = 240.0
_SLACK_S: Final = 10.0
"""How much longer than their timeouts calls may take together."""
_WORKERS: Final = 4
_AGAIN_S: Final = 0.05
_TRY_S: Final = 1.0


class ResultError(KvplugError):
    """A call reports a shortage by its result, and not by an error."""


class EndedError(ResultError):
    """A call reports by its result that the object has ended for good."""


class Exhaustion(Contract):
    """The test of law ALL-9, for everything with ends."""

    def ends(self, **context: Any) -> Ends:
        """How the tests make and use the ends of one connection."""
        raise NotImplementedError

    @property
    def running_out_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.forked_processes or ("" if Path("/proc/self/fd").exists() else "this needs Linux's /proc")

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
        return "", _faults(suite, LIMITS[limit])


def _faults(suite: Any, limit: Limit) -> list[str]:
    """What is wrong, at most some of it. All that is needed runs out from the first step on; later steps
    begin with nothing left, or one.
    """
    found: list[str] = []
    first = suite.ends().unlimited
    for step in range(first, _CHECK):
        num_unrefused = 0
        for number in range(MOST if step == first else _LATER):
            refused, faults = _judge(suite, limit, step, number)
            found += [f"{limit.name}, {number} left from {_STEPS[step]} on: {fault}" for fault in faults]
            if len(found) >= _SHOWN or any(BLOCKED in each for each in found):
                return found
            num_unrefused = 0 if refused else num_unrefused + 1
            if num_unrefused >= _ENOUGH:
                break
    return found


def _judge(suite: Any, limit: Limit, step: int, number: int) -> tuple[bool, list[str]]:
    """Begin the limit at that step, with ``number`` more available. Returns whether anything was refused, and
    what is wrong.
    """
    before, mapped = peers.Resources.of(), shared_mappings()
    failure, again = _try(suite, limit, step, number, SHORT_S)
    if failure is not None and failure.kinds == {"late"}:
        failure, again = _try(suite, limit, step, number, LONG_S)  # a busy machine, perhaps
    faults = []
    if failure is not None:
        if "foreign" in failure.kinds:
            faults.append(f"it raised an error that is not kvplug's: {failure.what}")
        elif not (failure.kinds <= {"result", "ended"} or failure.names & limit.resources):
            faults.append(f"no error named what ran out: {failure.what}")
    if again is not None:
        faults.append(f"the very next try without the limit failed: {again.what}")
    if left := _left(before, mapped, suite.settle_s):
        faults.append(f"left behind: {left}")
    return failure is not None, faults


def _try(
    suite: Any, limit: Limit, step: int, number: int, timeout_s: float
) -> tuple[_Failure | None, _Failure | None]:
    """What failed with the limit, and what failed in the next try without it."""
    with Attempt(suite) as attempt:
        if failure := attempt.run(0, step):
            return failure, failure
        attempt.timeout_s = timeout_s
        with limit.begin(number):
            failure = attempt.run(step, _CHECK)
        attempt.timeout_s = LONG_S
        again = attempt.run(_CHECK if failure is None else _STEPS.index(failure.step))
        # A thread of the object may have met the shortage: then only the next call can report it.
        if again is None or not (failure and attempt.may_break(failure.step) and again.excuses):
            return failure, again
    return failure, _whole(suite)


def _whole(suite: Any) -> _Failure | None:
    """What fails without a limit."""
    with Attempt(suite) as attempt:
        return attempt.run(0)


@attrs.frozen
class _Failure:
    """The errors of one step. Not the exceptions themselves: they keep alive what they have seen."""

    step: str
    what: str
    kinds: frozenset[str]
    """The kinds of errors, see :func:`_kind`."""
    names: frozenset[str]
    """The resources that they name."""

    @classmethod
    def of(cls, step: str, error: Exception) -> Self:
        errors = _each(error)
        text = "; ".join(f"{type(each).__name__}: {each}" for each in errors)
        named = (each.resource for each in errors if isinstance(each, ResourceExhaustedError))
        return cls(step, f"{step}: {text}"[:2000], frozenset(map(_kind, errors)), frozenset(named))

    @property
    def excuses(self) -> bool:
        """Whether they report that the object has ended, which only the shortage explains, or name what
        ran out earlier.
        """
        others = ({"late"}, {"result"}, {"result", "ended"})
        return bool(self.names) or not (self.kinds in others or {"named", "foreign"} & self.kinds)


def _each(error: Exception) -> list[Exception]:
    """The errors of a group, and of groups in it."""
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [each for part in error.exceptions for each in _each(part)]


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


# -- the steps ---------------------------------------------------------------------------------------

_STEPS: Final = ("share", "prepare", "offer", "meet", "exchange", "close", "check")
_CHECK: Final = _STEPS.index("check")
"""The number of the step that needs no object any more."""


class Attempt:
    """The ends of one connection, all in this process, are made, used and closed in steps.

    A step that has raised is made again: with the endpoint, and if the kind allows it with what was offered.
    """

    def __init__(self, suite: Any) -> None:
        self._suite = suite
        self._scope = ExitStack()
        self._kind: Ends = suite.ends()
        self._roles = range(len(self._kind.roles))
        self.timeout_s = LONG_S
        """The timeout of every call that a step makes."""
        self._was_met = False
        self._ends: list[End] = []
        self._received: list[list[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()

    def run(self, first: int, last: int = len(_STEPS)) -> _Failure | None:
        """Run these steps. Returns the errors of the first that fails."""
        for step in _STEPS[first:last]:
            try:
                getattr(self, step)()
            except Exception as e:
                return _Failure.of(step, e)
        return None

    def may_break(self, step: str) -> bool:
        """Whether the law allows that the object is broken after that step has raised. The next try reports
        that, and then a new object must work.
        """
        return step in self._kind.may_break

    def share(self) -> None:
        """Make what a test makes before the processes of ends, which is not judged."""
        self._scope.enter_context(self._suite.scope())
        self._kind = kind = self._suite.ends(**self._kind.shared())
        numbers = range(kind.num_exchanges)
        self._contents = [[kind.content(role, number) for role in self._roles] for number in numbers]

    def prepare(self) -> None:
        self._kind.prepare()

    def offer(self) -> None:
        self._contact = self._kind.offer()

    def meet(self) -> None:
        """Make the ends. What there is of them ends if it fails."""
        if self._was_met and not self._kind.keeps_offer:
            self.offer()
        self._was_met = True
        self._kind.timeout_s = self.timeout_s
        meeting = [partial(self._kind.end, role, self._contact) for role in self._roles]
        with self._suite.scope() as made:
            self._ends = [*self._together(*meeting), *self._kind.besides()]
            kept = made.pop_all()
        self._suite.later(kept.close)

    def exchange(self) -> None:
        """One exchange after the other: what was sent or received is not sent or received again."""
        take_part, timeout_s = self._together, self.timeout_s
        if self._kind.gives_results:  # an end that fails at once is not kept waiting by the other one
            take_part, timeout_s = self._results, min(timeout_s, _TRY_S)
        for contents in self._contents[len(self._received) :]:
            pairs = zip(self._ends, contents, strict=False)  # without those beside the roles
            parts = [partial(end.exchange, content, timeout_s) for end, content in pairs]
            self._received.append(take_part(*parts))
            for end in self._ends:
                end.done_once.clear()

    def _results(self, *parts: Callable[[], Any]) -> list[Any]:
        """An end that has failed is tried again after a while (law STORE-7)."""
        limit = time.monotonic() + self.timeout_s
        while True:
            try:
                return self._together(*parts)
            except* KvplugError as e:
                has_ended = any(end.closed() for end in self._ends)
                if has_ended or time.monotonic() > limit:
                    raise (EndedError if has_ended else ResultError)(str(e.exceptions)) from None
            time.sleep(_AGAIN_S)

    def close(self) -> None:
        def close_all() -> None:
            for end in reversed(self._ends):
                end.close(self.timeout_s)

        self._together(close_all)

    def check(self) -> None:
        for contents, received in zip(self._contents, self._received, strict=True):
            for end, content, got in zip(self._ends, contents, received, strict=False):
                end.check(content, got)

    def _together(self, *calls: Callable[[], Any]) -> list[Any]:
        return together(*calls, within=4 * self.timeout_s + _SLACK_S)


def together(*calls: Callable[[], Any], within: float) -> list[Any]:
    """Make these calls at the same time, in threads that exist already: more might be refused. Returns what
    they return.

    Raises:
        ExceptionGroup: the errors of all that raised, or that did not end within so many seconds.
    """
    begun = [_workers().submit(call) for call in calls]
    blocked = futures.wait(begun, within).not_done
    if blocked:
        faulthandler.dump_traceback(all_threads=True)  # to a descriptor that is there already
    errors = [each.exception() for each in begun if each not in blocked]
    errors += [AssertionError(f"{BLOCKED} after {within} s") for _ in blocked]
    if raised := [error for error in errors if error is not None]:
        raise BaseExceptionGroup("calls at the same time", raised)
    return [each.result() for each in begun]


@functools.cache
def _workers() -> futures.Executor:
    """Threads of this process that wait for calls."""
    made = futures.ThreadPoolExecutor(_WORKERS, "kvplug_testing worker")
    all_there = threading.Barrier(_WORKERS)
    futures.wait([made.submit(all_there.wait) for _ in range(_WORKERS)])
    return made
