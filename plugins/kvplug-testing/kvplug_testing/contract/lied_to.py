"""Law ALL-10, written once for all kinds: a peer that has proved its identity sends false messages.

Both ends are in one child process, and reach each other through a relay. The first conversation passes
unchanged. In each of the others one thing is changed: a message of one end, while the ends join or later, or
memory that one end has shared. A conversation uses the calls that the general laws have for the kind.
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
    """The test of law ALL-10."""

    lies: ClassVar[int] = 40
    """How many false messages the suite sends (law ALL-10). Give fewer if a conversation takes long."""
    _lied_to_s: ClassVar[float] = 0.1
    """The timeout of calls in conversations with false messages."""
    _lied_to_context: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The values of the ends' context that differ from the suite's defaults."""

    ends: Callable[..., Any]

    def _lied_to(self, relay: Relay, timeout_s: float) -> Sequence[Callable[[], Any]]:
        """Return functions that make the ends of a conversation. All are called at the same time."""
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
        """Whether the child process may have little address space only. Drivers of devices need very much."""
        return True

    @law("ALL-10", needs="lied_to_processes", timeout_s=300, level="long")
    def test_whatever_the_other_end_sends_each_call_ends_in_time_and_is_valid_or_fails(self) -> None:
        child = self.start_forked(_RUN, self.suite_ref(), self.lies, timeout_s=_LIFE_S)
        change = "nothing was changed"
        while True:
            try:
                answer = child.recv(4 * waits.patience_s + 8 * SLACK_S)
            except peers.ChildError:
                raise
            except KvplugError as e:
                raise AssertionError(f"{change}, and then the process ended: {e}") from e
            if answer is None:
                break
            change, breaches, not_judged = answer
            assert not breaches, f"{change}, and then: {'; '.join(breaches)}"
            if not_judged:
                pytest.skip(f"not judged: {not_judged}")
        child.result(2 * waits.patience_s + 3 * SLACK_S)


class _Wire:
    """Carries values between the ends of a connection, with the methods of :class:`.peers.Peer`."""

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
            raise TimeoutError("the other end has not sent its address") from None


def _through(relay: Relay) -> tuple[Any, Any]:
    one: queue.Queue[Any] = queue.Queue()
    other: queue.Queue[Any] = queue.Queue()
    return _Wire(relay, one, other), _Wire(relay, other, one)


# -- in the child process ------------------------------------------------------------------------------


def run_conversations(parent: peers.Parent, suite_ref: dict[str, Any], count: int) -> None:
    """Hold one conversation without a change, and ``count`` with one. Report each change, and the breaches
    that followed it."""
    suite: Any = suite_from_ref(suite_ref)
    with ExitStack() as suite._stack, faults_noted() as faults:
        suite.warm_up()

        def hold(*change: Any) -> _Conversation:
            held = _Conversation(suite, *change)
            held.hold()
            parent.send([held.change, held.breaches + faults.taken(), held.not_judged])
            return held

        true = hold()
        if true.not_judged:
            return
        with bounded(is_bounded=suite._is_bounded):
            waits.patience_s = 5 * suite._lied_to_s
            rng = random.Random(_SEED)
            for edit in itertools.islice(edits_of(true.recording, rng), count):
                parent.send([f"{edit}", [], ""])  # the parent reports it if this process dies
                hold(edit)
            for _ in range(count // 2 if true.hands_over_memory else 0):
                hold(None, rng)
        parent.send(None)


class _Conversation:
    """Two ends join, exchange, are called and are closed. With ``rng``, shared memory is changed."""

    def __init__(self, suite: Any, edit: Edit | None = None, rng: random.Random | None = None) -> None:
        self._suite = suite
        self._edit = edit
        self._rng = rng
        self._is_true = edit is None and rng is None
        self._within = waits.patience_s if self._is_true else suite._lied_to_s
        self.change = "nothing was changed" if edit is None else str(edit)
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
                self.not_judged = f"{self._suite.called} sends nothing through a kvplug.transport.Listener"

    def _change_memory(self, descriptors: Sequence[int]) -> None:
        with SharedMemory(descriptors) as memory:
            self.hands_over_memory = bool(memory)
            if memory.can_shrink():
                self.breaches.append("the peer can shrink memory: seal it (F_SEAL_SHRINK)")
            if self._rng is not None and memory:
                self.change = memory.tamper(self._rng)

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
        """Call ``run`` for all these things at the same time, and return the results."""
        return [call.result(_LIFE_S) for call in [Call(partial(run, thing)) for thing in things]]

    def _run(self, what: str, call: Callable[[], Any]) -> Outcome:
        """Make a call, which must end, and return its outcome."""
        running = Call(partial(Outcome.of, call))
        try:
            outcome: Outcome = running.result(self._within + SLACK_S)
        except waits.DeadlineError as e:
            outcome = Outcome(kinds=["DeadlineError"], text=str(e)[:20_000])
        if breach := self._breach(what, outcome):
            self.breaches.append(breach)
        return outcome

    def _breach(self, what: str, outcome: Outcome) -> str:
        """Return how an outcome breaks the law; empty if it does not."""
        if not outcome.kinds:
            return ""
        text = f"{what} {outcome}"
        if UnlikeError.__name__ in outcome.kinds:  # of what was not changed, only the end may be missing
            return text if self._is_true or (self._edit is not None and self._edit.cuts) else ""
        if KvplugError.__name__ not in outcome.kinds or (self._is_true and what.startswith("exchange")):
            return text
        return "" if is_printable(outcome.text) else f"{text!r}, with control characters of the peer's"
