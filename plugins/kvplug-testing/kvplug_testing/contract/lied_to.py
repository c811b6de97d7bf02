"""The bases of what judges law ALL-10.

:class:`LiedTo` is for ends that reach each other over kvplug's own listeners. A relay between the two changes
one thing of what the honest end says: while they join, in later messages, or in memory that it has handed
over. The other end, the victim, is a process of its own.

:class:`LiedToOverPipes` is for what is built on pipes. Both ends are in one child process, and the pipes that
they are given change one message.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Protocol

import attrs
import pytest

from kvplug import KvplugError
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import Contract, law
from kvplug_testing.tampering.conversing import Conversing
from kvplug_testing.tampering.edits import edits_of
from kvplug_testing.tampering.memory import SharedMemory
from kvplug_testing.tampering.relay import Relay
from kvplug_testing.tampering.victim import SLACK_S, Ended, victim

LISTENS, DIALS = "listens", "dials"
"""What the victim does. The other end does the other."""
_LIFE_S: Final = 1800.0
_has_listener: dict[str, bool] = {}
"""Whether the contact of a suite's ends is that of a listener, by the suite."""

_victims = pytest.mark.parametrize("role", [LISTENS, DIALS])


class LiedTo(Contract):
    """What a peer may say that has proved its identity."""

    lies: ClassVar[int] = 40
    """How many false messages the suite sends to each end (law ALL-10). Fewer where an end takes long to
    make."""
    _victim: ClassVar[str]
    """The function of the victim's process: ``"module:function"``."""

    def _contact(self) -> Any:
        """Plain values with the addresses of an end's listeners."""
        raise NotImplementedError

    def _conversations(self, relay: Relay, role: str, child: peers.Peer) -> Conversing:
        """Conversations of an honest end here and a victim with this role."""
        raise NotImplementedError

    @property
    def lied_to_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if self.other_processes:
            return self.other_processes
        key = str(self.suite_ref())
        if key not in _has_listener:
            try:
                contact = self._contact()
            except KvplugError:
                return ""  # the tests report it
            with Relay() as relay:
                _has_listener[key] = relay.through_plain(contact) != contact
        if _has_listener[key]:
            return ""
        return f"not judged: the contact of {self.called} names no kvplug.transport.Listener to stand before"

    @law("ALL-10", needs="lied_to_processes", timeout_s=300, level="long")
    @_victims
    def test_whatever_a_peer_says_each_call_ends_in_time_in_a_message_or_an_error(self, role: str) -> None:
        with self._conversing(role) as conversing:
            possible = edits_of(conversing.truth(), random.Random(8), forward=role == LISTENS)
            edits = [*itertools.islice(possible, self.lies)]
            if not edits:
                pytest.skip(f"not judged: {self.called} sends nothing through a kvplug.transport.Listener")
            for edit in edits:
                conversing.lie(edit)

    @law("ALL-10", needs="lied_to_processes", timeout_s=300, level="long")
    @_victims
    def test_whatever_a_peer_writes_into_shared_memory_each_call_ends_in_time(self, role: str) -> None:
        with self._conversing(role) as conversing:
            conversing.begin()
            with SharedMemory(conversing.relay.descriptors) as memory:
                if not memory:
                    pytest.skip(f"{self.called} hands over no memory by a descriptor")
                assert not memory.can_shrink(), "the peer can shrink memory: seal it (F_SEAL_SHRINK)"
            conversing.go_on()
            rng = random.Random(8)
            for _ in range(self.lies // 2):
                conversing.tamper(rng)

    @contextmanager
    def _conversing(self, role: str) -> Iterator[Conversing]:
        child = self.start_forked(self._victim, self.suite_ref(), role, timeout_s=_LIFE_S)
        with self.scope(), Relay() as relay:
            conversing = self._conversations(relay, role, child)
            yield conversing
            conversing.end()


def be_lied_to(
    parent: peers.Parent, suite: Any, converse: Callable[..., list[Ended]], *, bounded: bool
) -> str:
    """In the victim's process: converse as often as the parent wants; ``converse`` takes what it sends."""
    suite.warm_up()
    with victim(bounded=bounded) as here:
        while True:
            order, *given = parent.recv(None)
            if order == "end":
                return here.grown()
            calls = converse(*given)
            parent.send([[attrs.asdict(call) for call in calls], here.faults()])


class Conversations(Protocol):
    """Of two ends in one process, one after the other."""

    def truth(self) -> list[Ended]:
        """One in which nothing is changed: how its calls have ended."""

    def lies(self, rng: random.Random) -> Iterator[Any]:
        """What may be changed, according to the truth, without end; none if there is nothing."""

    def lie(self, lie: Any) -> tuple[str, list[Ended]]:
        """One in which this is changed: what was changed, in words, and how the calls have ended."""


class LiedToOverPipes(Contract):
    """What the other end of its pipes may say."""

    lies: ClassVar[int] = 40
    """How many false messages the suite sends (law ALL-10). Fewer where a conversation takes long."""
    _run_ends: ClassVar[str]
    """The function of the ends' process, which calls :func:`report_lies`: ``"module:function"``."""

    @property
    def lied_to_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.forked_processes

    @law("ALL-10", needs="lied_to_processes", timeout_s=300, level="long")
    def test_whatever_the_other_end_says_each_call_ends_in_time_in_what_was_asked_for(self) -> None:
        child = self.start_forked(self._run_ends, self.suite_ref(), self.lies, 8, timeout_s=_LIFE_S)
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
            if not_judged:
                pytest.skip(not_judged)
            assert not breaches, f"{said}, and then: {'; '.join(breaches)}"
        grown = child.result(2 * waits.patience_s + 3 * SLACK_S)
        assert not grown, grown


def report_lies(
    parent: peers.Parent, conversations: Conversations, count: int, seed: int, *, bounded: bool = True
) -> str:
    """In the child process: hold the conversations, and report what is wrong after each of them."""
    with victim(bounded=bounded) as here:
        calls = conversations.truth()
        failed = [f"{call.call} raised {call.error}: {call.text}" for call in calls if call.error]
        here.hold_honest()
        parent.send(["nothing was changed", failed + _breaches(calls) + here.faults(), ""])
        rng = random.Random(seed)
        lies = [*itertools.islice(conversations.lies(rng), count)]
        if not lies:
            parent.send(["", [], "not judged: nothing comes over the pipes that were given"])
        for lie in lies:
            parent.send([f"{lie}", [], ""])  # the last word of a process that dies
            said, calls = conversations.lie(lie)
            parent.send([said, _breaches(calls) + here.faults(), ""])
        parent.send(None)
        return here.grown()


def _breaches(calls: list[Ended]) -> list[str]:
    return [breach for call in calls if (breach := call.breach())]
