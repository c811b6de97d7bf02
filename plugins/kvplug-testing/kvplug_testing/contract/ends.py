"""The ends of what is judged, here and in other processes, as the general laws see them.

A kind defines in one :class:`Ends` how connected ends are made, and in an :class:`End` which calls each has.
:mod:`kvplug_testing.contract.general` judges with these the laws that hold for everything with an end. A
method of an end runs in the process where the end is; a :class:`Handle` calls it from the test.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Final

import attrs

from kvplug import KvplugError, PeerGoneError, TimeoutError
from kvplug_testing import peers, waits
from kvplug_testing.comparison import UnlikeError, difference
from kvplug_testing.contract.base import at_host
from kvplug_testing.contract.footprint import Footprint
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.waits import Call

CHILD_S: Final = 900.0
"""The time limit of another process: longer than that of any test."""
CLOSE_S: Final = 0.1
"""The timeout of a close in tests that do not wait for it."""
RUN_END: Final = f"{__name__}:run_end"
LEAVES: Final = ("abort", "close", "neither")
"""What a program does with its end right before it leaves."""
_LEAVES_WITH: Final = 7
_LEAVES_S: Final = 20.0
"""The limit of a busy machine."""
_GRANDCHILD_S: Final = 120
_INTERRUPT_S: Final = 0.3

Calls = Mapping[str, Callable[..., Any]]
"""Calls by name; their keyword argument is ``timeout``."""


def fields_of(context: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a transport's context. ``at_host`` stands for those of an end on the host 0 or 1."""
    given_ = dict(context)
    host = given_.pop("at_host", None)
    return given_ if host is None else {**at_host(host), **given_}


class End:
    """One end, in the process that made it. Arguments and results of methods are plain values."""

    role: str = "end"
    """Its name, for messages."""
    gone: type[KvplugError] | None = PeerGoneError
    """What its calls raise when the process at the other end has died; ``None`` if they go on."""
    leaves: bool = True
    """Whether it ends that way for this end, too, when the other end was closed and has not died."""
    gone_later: type[KvplugError] = PeerGoneError
    """What they raise after the first one has raised it."""
    awaits: str = ""
    """What the message of a call that timed out names."""
    one_thread: Sequence[str] = ()
    """Blocking calls for one thread at a time: a second one gets ``BusyError``."""
    thing: Any = None
    """The object."""
    content: Callable[[int], Any]
    """:meth:`Ends.content` of its role."""

    # -- what a kind defines -------------------------------------------------------------------

    def calls(self) -> Calls:
        """The calls that an end which has ended refuses, whatever their timeout."""
        return {}

    def untimed(self) -> Mapping[str, Callable[[], Any]]:
        """Those that take no timeout."""
        return {}

    def blocking(self) -> Calls:
        """The calls that block for ever after :meth:`clog`, while the other end does nothing.

        A call that succeeds later than its timeout must be one that :meth:`drain` receives.
        """
        return {}

    def unclogged(self) -> Sequence[str]:
        """Those of them that block without :meth:`clog`, too."""
        return [*self.blocking()]

    def idles(self) -> str:
        """One of them that blocks though the other end makes its own such call; empty if there is none."""
        return next(iter(self.unclogged()), "")

    def doomed(self) -> Sequence[str]:
        """Those of them that raise :attr:`gone`."""
        return [*self.blocking()]

    def timed(self) -> Calls:
        """The calls that take a timeout, and refuse a wrong one."""
        return {**self.blocking(), **self.calls(), "close": self.close}

    def close(self, timeout: float | None) -> None:
        """End it politely, by a deadline (law ALL-1)."""
        self.thing.close(timeout)

    def abort(self) -> None:
        """End it at once."""
        self.thing.abort()

    def closed(self) -> bool | None:
        """Whether this end was ended; ``None`` if it does not report that."""
        return bool(self.thing.closed)

    def exchange(self, content: Any, timeout: float | None) -> Any:
        """This end's part in an exchange of all ends. Returns what it receives."""
        raise NotImplementedError(f"the {self.role} end takes no part")

    def check(self, content: Any, received: Any) -> None:
        """Raise an error if what an exchange has brought is wrong.

        Raises:
            AssertionError: it has not the form of what was asked for.
            UnlikeError: it has, and is something else.
        """
        if wrong := difference(content, received):
            raise UnlikeError(f"the {self.role} end received something else: {wrong}")

    def once(self, step: str, call: Callable[[], Any]) -> Any:
        """What a step of an exchange returns. It is not made again in an exchange that is tried again."""
        if step not in self.done_once:
            self.done_once[step] = call()
        return self.done_once[step]

    @functools.cached_property
    def done_once(self) -> dict[str, Any]:
        """The steps of the exchange that has begun."""
        return {}

    def clog(self) -> int:
        """Send to the other end, which receives nothing, until there is no room. Returns how much that is."""
        return 0

    def drain(self, count: int) -> None:
        """Receive so much, which the other end's :meth:`clog` has sent, and check it."""
        assert not count, f"the {self.role} end receives nothing"

    def lied_to(self) -> Calls:
        """Calls that are made after some exchanges with an end that lies. They check the form of what they
        return.
        """
        return self.calls()

    # -- what tests do with it -----------------------------------------------------------------

    def part(self, number: int, timeout: float | None) -> None:
        """This end's part in exchange ``number`` of all ends; checks what it receives."""
        content = self.content(number)
        received = self.exchange(content, timeout)
        self.done_once.clear()
        self.check(content, received)

    def describe(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "gone": None if self.gone is None else self.gone.__name__,
            "leaves": self.leaves,
            "awaits": self.awaits,
            "blocking": [*self.blocking()],
            "unclogged": [*self.unclogged()],
            "idles": self.idles(),
            "one_thread": [*self.one_thread],
            "timed": [*self.timed()],
            "doomed": [*self.doomed()],
            "pid": os.getpid(),
        }

    def wait(self, name: str, *timeout: float | None) -> Any:
        """Make a blocking call. Without a timeout it is made with the context's."""
        return self.blocking()[name](**({"timeout": timeout[0]} if timeout else {}))

    def end(self, how: str) -> None:
        if how == "abort":
            self.abort()
        else:
            self.close(CLOSE_S)

    def not_closed(self, timeout: float | None = 0.5) -> str:
        """The calls that do not raise ``ClosedError``; empty if all do."""
        calls = _with(timeout, self.calls()) | {**self.untimed()}
        wrong = self._unlike(calls, lambda kinds: "ClosedError" in kinds)
        return wrong or ("" if self.closed() is not False else f"{self.role}: closed() is false")

    def wrong_timeouts(self, timeout: Any) -> str:
        """The calls that do not refuse such a timeout with a ``ValueError``, which blames neither themselves
        nor their peer; empty if all do.
        """

        def is_right(kinds: Sequence[str]) -> bool:
            return "ValueError" in kinds and ("KvplugError" not in kinds or "ConfigError" in kinds)

        return self._unlike(_with(timeout, self.timed()), is_right)

    def _unlike(
        self, calls: Mapping[str, Callable[[], Any]], is_right: Callable[[Sequence[str]], bool]
    ) -> str:
        """The calls whose error is not right."""
        outcomes = {name: Outcome.of(call) for name, call in calls.items()}
        wrong = (f"{name} {outcome}" for name, outcome in outcomes.items() if not is_right(outcome.kinds))
        return "; ".join(f"{self.role}: {each}" for each in wrong)

    def is_gone(self) -> None:
        """The calls that need the other end raise :attr:`gone`, again and again. Before the death is noticed,
        one that sends may succeed.
        """
        assert self.gone is not None
        for name in self.doomed():
            num_raised, limit = 0, time.monotonic() + waits.patience_s
            while num_raised < 2:
                outcome = Outcome.of(functools.partial(self.wait, name, waits.patience_s))
                if outcome.kinds:
                    outcome.raised(name, self.gone, self.gone_later)
                    wrong = {"ClosedError", "TimeoutError"} & {*outcome.kinds}
                    assert not wrong, f"{name} of an end whose peer is gone {outcome}"
                    num_raised += 1
                assert num_raised or time.monotonic() < limit, f"{name} never raises {self.gone.__name__}"
        self.is_still_open()

    def is_still_open(self) -> None:
        """Only the other end has ended."""
        assert not self.closed(), f"{self.role}: it reports that it was closed at this end"

    def work(self, first: int = 0) -> int:
        """Take part in exchanges without end. Raises the error that ends it."""
        for number in itertools.count(first):
            self.part(number, None)
        raise AssertionError("unreachable")

    def busy(self, leaves: bool) -> None:
        """Make calls without end while a program leaves: this one, if it ``leaves``, or the other end's. A
        thread of one that leaves may drop no tensor: that is a call of torch, which may then abort the
        process, whatever the transport does. Raises the error that ends it.
        """
        self.work()

    def look_in_forked_child(self) -> str:
        """What is wrong with this end in a forked child of its process; empty if nothing is."""

        def look() -> str:
            found = self.not_closed()
            self.close(CLOSE_S)
            self.abort()
            return found or self.not_closed()

        return in_forked_child(look)

    def interrupted(self, name: str) -> str:
        """The error of a blocking call whose thread, the main one, gets SIGINT meanwhile."""
        main = threading.main_thread().ident
        assert main is not None and main == threading.get_ident()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        timer = threading.Timer(_INTERRUPT_S, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        try:
            self.wait(name, 60 * _INTERRUPT_S)
        except BaseException as e:
            return type(e).__name__
        finally:
            timer.join()
        return "nothing"

    def take_footprint(self) -> None:
        """For :meth:`growth`: of the process."""
        self._footprint = Footprint.taken()

    def growth(self, rounds: int, nbytes: int) -> str:
        """What has grown since then, see :meth:`.Footprint.growth`."""
        return Footprint.taken().growth(self._footprint, rounds, nbytes)

    def cpu_s(self) -> float:
        """Seconds of processor time that its process has used."""
        return time.process_time()

    def leave_a_child(self) -> int:
        """Leave a process behind that does nothing and holds every descriptor of this one: no hook of
        Python's has run in it. Returns its pid.
        """
        libc = ctypes.PyDLL(None)
        if (pid := libc.fork()) == 0:
            libc.sleep(_GRANDCHILD_S)
            libc._exit(0)
        return int(pid)


def _with(timeout: Any, calls: Calls) -> dict[str, Callable[[], Any]]:
    return {name: functools.partial(call, timeout=timeout) for name, call in calls.items()}


class Ends(abc.ABC):
    """How the ends of one connection are made, and what the kind's laws allow them.

    The end of role 0 has a contact, by which the others reach it: here, or in other processes. Each process
    has an object of its own. What it makes ends with the suite's scope.
    """

    roles: ClassVar[Sequence[str]]
    """The ends of one connection."""
    breaks_by_timeout: ClassVar[bool] = False
    """Whether a call that has timed out leaves the end broken, so that all later calls raise."""
    has_heartbeat: ClassVar[bool] = False
    """Whether ``heartbeat_timeout_s`` of the context limits how long another host may be silent."""
    keeps_offer: ClassVar[bool] = True
    """Whether the same offer can be met after :meth:`accept` or :meth:`connect` has failed."""
    may_break: ClassVar[Sequence[str]] = ("exchange",)
    """The steps that may leave the object broken where something has run out. By default it must go on."""
    unlimited: ClassVar[int] = 1
    """How many of the first steps of an attempt run without a limit: see
    :class:`.exhaustion.Attempt`."""
    num_exchanges: ClassVar[int] = 1
    """How many exchanges there are until each size of messages has had its turn."""
    gives_results: ClassVar[bool] = False
    """Whether a shortage is a result instead of an error. It names no resource, and may recur for a while."""

    def __init__(self, suite: Any, context: Mapping[str, Any]) -> None:
        """``context``: what differs from the suite's defaults, ``timeout_s`` or ``heartbeat_timeout_s``."""
        self.suite = suite
        self.context = context
        self.timeout_s = waits.patience_s
        """The timeout of calls that make an end."""
        self.is_local = True
        """Whether all ends are in this process."""

    # -- what a kind defines -------------------------------------------------------------------

    def shared(self) -> dict[str, Any]:
        """The context for the processes of all ends, in plain values. Called first, in the test's process."""
        return dict(self.context)

    def prepare(self) -> None:  # noqa: B027 - not every kind has any
        """Make what a process needs for any of the ends: an endpoint."""

    @abc.abstractmethod
    def offer(self) -> Any:
        """Make what role 0 needs to be reached. Returns its contact, a plain value."""

    @abc.abstractmethod
    def accept(self) -> End:
        """The end of role 0, while the others call :meth:`connect`."""

    @abc.abstractmethod
    def connect(self, role: int, contact: Any) -> End:
        """The end of another role."""

    def besides(self) -> list[End]:
        """More ends of the process that has offered, such as a listener."""
        return []

    @abc.abstractmethod
    def content(self, role: int, number: int) -> Any:
        """What an end sends, and what it must receive, in exchange ``number``."""

    # -- what tests do with it -----------------------------------------------------------------

    def end(self, role: int, contact: Any) -> End:
        """The end of that role."""
        made = self.connect(role, contact) if role else self.accept()
        made.content = functools.partial(self.content, role)
        return made

    def make(self, children: Sequence[peers.Peer | None]) -> list[End | None]:
        """Make the ends that are here, connected with those in the child processes: for each role its
        process, or ``None``. More ends may follow those of the roles.
        """
        self.is_local = not any(children)
        if not all(children):
            self.prepare()
        contact = self.offer() if children[0] is None else children[0].recv()
        for child in children[1:]:
            if child is not None:
                child.send(contact)
        calls = [
            None if child else Call(functools.partial(self.end, role, contact))
            for role, child in enumerate(children)
        ]
        made = [None if call is None else call.result(2 * waits.patience_s) for call in calls]
        return [*made, *(self.besides() if children[0] is None else ())]

    def join(self, parent: peers.Parent, role: int) -> End:
        """In a child process: make the end of this role, connected with those that :meth:`make` makes."""
        self.is_local = False
        self.prepare()
        if role:
            return self.end(role, parent.recv(None))
        contact = self.offer()
        parent.send(contact)
        return self.end(role, contact)


# -- calls of ends from the test -------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Outcome:
    """How a call of an end has ended."""

    value: Any = None
    kinds: Sequence[str] = ()
    """The names of the error's class and of its bases; empty if it returned."""
    text: str = ""
    """The error's message."""
    took_s: float = 0.0
    error: BaseException | None = None
    """The error itself, if it was raised in this process."""

    @classmethod
    def of(cls, call: Callable[[], Any]) -> Outcome:
        began = time.monotonic()
        try:
            value = call()
        except BaseException as e:
            kinds = [kind.__name__ for kind in type(e).__mro__]
            return cls(kinds=kinds, text=str(e), took_s=time.monotonic() - began, error=e)
        return cls(value=value, took_s=time.monotonic() - began)

    def __str__(self) -> str:
        return f"raised {self.kinds[0]}: {self.text}" if self.kinds else f"returned {self.value!r}"

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        assert not self.kinds, str(self)
        return self.value

    def raised(self, what: str, *kinds: type[BaseException] | str) -> Outcome:
        """Assert that it raised one of these."""
        names = [kind if isinstance(kind, str) else kind.__name__ for kind in kinds]
        assert {*names} & {*self.kinds}, f"{' or '.join(names)} was expected of {what}, and it {self}"
        return self


class Pending:
    """A call that has begun."""

    def __init__(self, what: str, outcome: Callable[[float], Outcome], blocked: Callable[[float], bool]):
        self._what = what
        self._outcome = outcome
        self._kept: Outcome | None = None
        self.is_blocked = blocked
        """Whether it is still under way after so many seconds."""

    def outcome(self, within: float | None = None) -> Outcome:
        if self._kept is None:
            self._kept = self._outcome(waits.patience_s + 1 if within is None else within)
        return self._kept

    def result(self, within: float | None = None) -> Any:
        return self.outcome(within).result()

    def raised(self, *kinds: type[BaseException] | str, within: float | None = None) -> Outcome:
        return self.outcome(within).raised(self._what, *kinds)

    def check_blocked(self, for_s: float = 0.1) -> Pending:
        assert self.is_blocked(for_s), f"{self._what} did not wait: it {self.outcome()}"
        return self


class Handle(abc.ABC):
    """An end, as a test calls it."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.role: str = facts["role"]
        self.blocking: list[str] = facts["blocking"]
        self.gone: str | None = facts["gone"]

    @abc.abstractmethod
    def begin(self, method: str, *args: Any) -> Pending:
        """Begin a call of one of its methods."""

    @abc.abstractmethod
    def in_main_thread(self, method: str, *args: Any) -> Any:
        """Call a method in its process's main thread, which must return in time."""

    def run(self, method: str, *args: Any) -> Any:
        """Call a method, which must return in time."""
        return self.begin(method, *args).result()

    def forks(self) -> str:
        """What is wrong with it in a forked child of its process."""
        return str(self.begin("look_in_forked_child").result(waits.patience_s + 5))


class LocalHandle(Handle):
    """An end of this process. Its calls are made in threads."""

    def __init__(self, end: End) -> None:
        super().__init__(end.describe())
        self.end = end

    def begin(self, method: str, *args: Any) -> Pending:
        call = Call(lambda: Outcome.of(lambda: getattr(self.end, method)(*args)))
        return Pending(f"{method} {args} of the {self.role} end", call.result, call.is_blocked)

    def in_main_thread(self, method: str, *args: Any) -> Any:
        return getattr(self.end, method)(*args)


class RemoteHandle(Handle):
    """An end of another process, which runs :func:`run_end`."""

    def __init__(self, child: peers.Peer) -> None:
        super().__init__(child.recv(2 * waits.patience_s))
        self.child = child
        self._numbers = itertools.count(1)
        self._outcomes: dict[int, Outcome] = {}

    def begin(self, method: str, *args: Any) -> Pending:
        number = next(self._numbers)
        self.child.send([number, method, list(args)])
        return Pending(
            f"{method} {args} of the {self.role} end",
            functools.partial(self._outcome, number),
            functools.partial(self._blocked, number),
        )

    def _outcome(self, number: int, within: float) -> Outcome:
        limit = time.monotonic() + within
        while number not in self._outcomes:
            self._receive(max(0.0, limit - time.monotonic()))
        return self._outcomes.pop(number)

    def _blocked(self, number: int, for_s: float) -> bool:
        limit = time.monotonic() + for_s
        while number not in self._outcomes:
            if not self.child.poll(max(0.0, limit - time.monotonic())):
                return True
            self._receive(0.0)
        return False

    def _receive(self, within: float) -> None:
        number, plain = self.child.recv(within)
        self._outcomes[number] = Outcome(**plain)

    def in_main_thread(self, method: str, *args: Any) -> Any:
        self.child.send([0, method, list(args)])
        return self._outcome(0, waits.patience_s + 10).result()

    def leave(self, way: str) -> None:
        """Let its program leave after one of :data:`LEAVES`, and check law ALL-8."""
        self.child.send(["leave", way, []])
        assert self.child.recv() == "leaves"
        try:
            code = self.child.wait(_LEAVES_S)
        except TimeoutError as e:
            raise AssertionError(f"a program that left has not ended after {_LEAVES_S:.0f} s: {e}") from None
        assert code == _LEAVES_WITH and not self.child.stderr, (
            f"a program that was to leave silently with exit code {_LEAVES_WITH}: {peers.end_of(code)};"
            f" it wrote to stderr: {self.child.stderr or 'nothing'}"
        )


def run_end(parent: peers.Parent, suite_ref: dict[str, Any], role: int, context: dict[str, Any]) -> None:
    """In another process: make an end, and carry out the test's calls, each in a thread."""
    suite: Any = suite_from_ref(suite_ref)
    suite.warm_up()
    with ExitStack() as suite._stack:
        end = suite.ends(**context).join(parent, role)
        parent.send(end.describe())
        _serve(parent, end)


def _serve(parent: peers.Parent, end: End) -> None:
    def call(number: int, method: str, args: list[Any]) -> None:
        outcome = Outcome.of(lambda: getattr(end, method)(*args))
        parent.send([number, attrs.asdict(attrs.evolve(outcome, error=None), recurse=False)])

    while True:
        match parent.recv(None):
            case ["leave", str(way), _]:
                parent.send("leaves")
                if way == "abort":
                    end.abort()
                elif way == "close":
                    end.close(CLOSE_S)
                parent.leave(_LEAVES_WITH)
            case ["exit", *_]:
                os._exit(0)
            case [0, method, args]:
                call(0, method, args)
            case [number, method, args]:
                threading.Thread(target=call, args=(number, method, args), daemon=True).start()
