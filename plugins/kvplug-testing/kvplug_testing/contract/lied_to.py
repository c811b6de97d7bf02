"""Law ALL-10, written once for all kinds: what a peer says that has proved its identity.

Both ends are in one child process, and reach each other through a relay. After a conversation in which
nothing was changed, many follow in which one thing is: of what an end says, while they join or later, or of
memory that it has handed over. A conversation is made of what the general laws know of a kind's ends.
"""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final

import pytest

from kvplug import KvplugError, TimeoutError
from kvplug_testing import peers, waits
from kvplug_testing.comparison import UnlikeError
from kvplug_testing.contract.base import Contract, law
from kvplug_testing.contract.ends import End, Outcome
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.tampering.lies import Edit, Recording, edits_of
from kvplug_testing.tampering.relay import Relay
from kvplug_testing.tampering.victim import SharedMemory, bounded, faults_noted, is_printable
from kvplug_testing.waits import Call

SLACK_S: Final = 10.0
"""How much later than its timeout a call may end: machines are busy."""
_SEED: Final = 8
_RUN: Final = f"{__name__}:run_conversations"
_LIFE_S: Final = 1800.0


class LiedTo(Contract):
    """What a peer may say."""

    lies: ClassVar[int] = 40
    """How many false messages the suite sends (law ALL-10). Fewer where a conversation takes long."""
    _lied_to_s: ClassVar[float] = 0.1
    """The timeout of calls of ends that are lied to."""
    _lied_to_context: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """What of their context differs from the suite's defaults."""

    ends: Callable[..., Any]

    def _before_lies(self) -> None:
        """Make what stays while many conversations begin and end."""

    def _lied_to(self, relay: Relay, timeout_s: float) -> Sequence[Callable[[], Any]]:
        """What makes each :class:`.End` of a conversation. They are called at the same time."""
        here, there = _through(relay)
        context = self.ends(timeout_s=timeout_s, **self._lied_to_context).shared()
        one, other = (self.ends(**context) for _ in range(2))
        return [lambda: one.make([None, here])[0], lambda: other.join(there, 1)]

    @property
    def lied_to_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if self.ends_are_processes:
            return f"ends of {self.called} are lied to in one process (ends_are_processes)"
        return self.forked_processes

    @property
    def _is_bounded(self) -> bool:
        """Whether the process that is lied to gets few addresses: drivers of devices take very many."""
        return True

    @law("ALL-10", needs="lied_to_processes", timeout_s=300, level="long")
    def test_whatever_the_other_end_says_each_call_ends_in_time_in_what_was_asked_for(self) -> None:
        child = self.start_forked(_RUN, self.suite_ref(), self.lies, timeout_s=_LIFE_S)
        said = "nothing was changed"
        while True:
            try:
                answer = child.recv(4 * waits.patience_s + 8 * SLACK_S)
            except peers.ChildError:
                raise
            except KvplugError as e:
                raise AssertionError(f"{said}, and then the process did not live on: {e}") from e
            if answer is None:
                break
            said, breaches, not_judged = answer
            assert not breaches, f"{said}, and then: {'; '.join(breaches)}"
            if not_judged:
                pytest.skip(f"not judged: {not_judged}")
        child.result(2 * waits.patience_s + 3 * SLACK_S)


class _Wire:
    """What one end of a connection sends to the other's process, as :class:`.peers.Peer` does."""

    def __init__(self, relay: Relay, inbox: queue.Queue[Any], outbox: queue.Queue[Any]) -> None:
        self._relay = relay
        self._inbox = inbox
        self._outbox = outbox

    def send(self, value: Any) -> None:
        self._outbox.put(self._relay.through(value))

    def recv(self, timeout: float | None = None) -> Any:
        try:
            return self._inbox.get(timeout=waits.patience_s)
        except queue.Empty:
            raise TimeoutError("the other end has not said how to reach it") from None


def _through(relay: Relay) -> tuple[Any, Any]:
    one: queue.Queue[Any] = queue.Queue()
    other: queue.Queue[Any] = queue.Queue()
    return _Wire(relay, one, other), _Wire(relay, other, one)


# -- in the child process ------------------------------------------------------------------------------


def run_conversations(parent: peers.Parent, suite_ref: dict[str, Any], count: int) -> None:
    """Hold one that is true and so many that are not. Reports what was changed and what is wrong then."""
    suite: Any = suite_from_ref(suite_ref)
    with ExitStack() as suite._stack, faults_noted() as faults:
        suite.warm_up()
        suite._before_lies()

        def hold(*change: Any) -> _Conversation:
            held = _Conversation(suite, *change)
            held.hold()
            parent.send([held.said, held.breaches + faults.taken(), held.not_judged])
            return held

        true = hold()
        if true.not_judged:
            return
        with bounded(is_bounded=suite._is_bounded):
            waits.patience_s = 5 * suite._lied_to_s
            rng = random.Random(_SEED)
            for edit in itertools.islice(edits_of(true.recording, rng), count):
                parent.send([f"{edit}", [], ""])  # the last word of a process that dies
                hold(edit)
            for _ in range(count // 2 if true.hands_over_memory else 0):
                hold(None, rng)
        parent.send(None)


class _Conversation:
    """Two ends join, exchange, are called and are closed. With ``rng`` memory is changed in the middle."""

    def __init__(self, suite: Any, edit: Edit | None = None, rng: random.Random | None = None) -> None:
        self._suite = suite
        self._edit = edit
        self._rng = rng
        self._is_true = edit is None and rng is None
        self._within = waits.patience_s if self._is_true else suite._lied_to_s
        self.said = "nothing was changed" if edit is None else str(edit)
        self.breaches: list[str] = []
        self.not_judged = ""
        self.recording: Recording = {}
        self.hands_over_memory = False

    def hold(self) -> None:
        with Relay(self._edit) as relay, self._suite.scope():
            makers = self._suite._lied_to(relay, waits.patience_s / 2)
            joined = self._each(partial(self._run, "joining"), makers)
            if self._is_true and (failed := [outcome for outcome in joined if outcome.kinds]):
                self.not_judged = f"through a relay joining {failed[0]}"
                return
            ends = [outcome.value for outcome in joined if not outcome.kinds]
            self._each(partial(self._exchange, (1,)), ends)
            self._change_memory(relay.descriptors)
            for phase in (partial(self._exchange, (2, 3, 0)), self._call, self._close):
                self._each(phase, ends)
            self.recording = {stream: [*sent] for stream, sent in relay.recording.items()}
            if self._is_true and not any(map(any, self.recording.values())):
                self.not_judged = f"{self._suite.called} says nothing through a kvplug.transport.Listener"

    def _change_memory(self, descriptors: Sequence[int]) -> None:
        with SharedMemory(descriptors) as memory:
            self.hands_over_memory = bool(memory)
            if memory.can_shrink():
                self.breaches.append("the peer can shrink memory: seal it (F_SEAL_SHRINK)")
            if self._rng is not None and memory:
                self.said = memory.tamper(self._rng)

    def _exchange(self, numbers: Sequence[int], end: End) -> None:
        for number in numbers:
            if self._run(f"exchange {number}", partial(end.part, number, self._within)).kinds:
                break

    def _call(self, end: End) -> None:
        for name, call in end.lied_to().items():
            self._run(name, partial(call, timeout=self._suite._lied_to_s))

    def _close(self, end: End) -> None:
        self._run("close", partial(end.close, self._within))

    def _each(self, run: Callable[[Any], Any], things: Sequence[Any]) -> list[Any]:
        """For each of these things at the same time."""
        return [call.result(_LIFE_S) for call in [Call(partial(run, thing)) for thing in things]]

    def _run(self, what: str, call: Callable[[], Any]) -> Outcome:
        """A call, which must end."""
        running = Call(partial(Outcome.of, call))
        try:
            outcome: Outcome = running.result(self._within + SLACK_S)
        except waits.DeadlineError as e:
            outcome = Outcome(kinds=["DeadlineError"], text=str(e)[:20_000])
        if breach := self._breach(what, outcome):
            self.breaches.append(breach)
        return outcome

    def _breach(self, what: str, outcome: Outcome) -> str:
        """What is wrong with it; empty: nothing."""
        if not outcome.kinds:
            return ""
        said = f"{what} {outcome}"
        if UnlikeError.__name__ in outcome.kinds:  # of what was not changed, only the end may be missing
            return said if self._is_true or (self._edit is not None and self._edit.cuts) else ""
        if KvplugError.__name__ not in outcome.kinds or (self._is_true and what.startswith("exchange")):
            return said
        return "" if is_printable(outcome.text) else f"{said!r}, with codes of the peer's"
