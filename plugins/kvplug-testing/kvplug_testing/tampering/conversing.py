"""The honest end's side of conversations with a victim: what is told to it, and what it reports."""

from __future__ import annotations

import abc
import random
from typing import Any, Final

import pytest

from kvplug import KvplugError
from kvplug_testing import peers, waits
from kvplug_testing.tampering.edits import Edit, Recording
from kvplug_testing.tampering.memory import SharedMemory
from kvplug_testing.tampering.relay import Relay
from kvplug_testing.tampering.victim import CALL_S, SLACK_S, Ended

JOIN_S: Final = 0.5
"""The timeout of joins when something was changed."""


class Conversing(abc.ABC):
    """Conversations of a victim and an honest end, whose words the relay may change, one after the other.

    Of each kind, a subclass says how one begins (:meth:`_begin`), goes on and ends.
    """

    def __init__(self, relay: Relay, child: peers.Peer) -> None:
        self.relay = relay
        self._child = child
        self._said = ""
        self._is_false = False

    # -- one of them -----------------------------------------------------------------------------------

    def truth(self) -> Recording:
        """The recording of a conversation in which nothing is changed."""
        self.begin()
        calls = self.go_on()
        if not calls or calls[0].error:
            why = f"{calls[0].call} ends in {calls[0].error}: {calls[0].text}" if calls else "no end joins"
            pytest.skip(f"not judged: through a relay {why}")
        for call in calls:
            assert not call.error, f"nothing was changed, and {call.call} ends in {call.error}: {call.text}"
        self._check_order(calls, complete=True)
        return self.relay.recording

    def lie(self, edit: Edit) -> None:
        """A conversation in which one thing is changed."""
        self.begin(edit)
        calls = self.go_on()
        if edit.cuts:
            self._check_order(calls)

    def tamper(self, rng: random.Random) -> None:
        """A conversation in which memory is changed before the victim goes on."""
        self.begin()
        with SharedMemory(self.relay.descriptors) as memory:
            self._said = memory.tamper(rng)
        self._is_false = True
        self.go_on()

    def begin(self, edit: Edit | None = None) -> None:
        """A conversation up to where the victim begins to receive."""
        self._said = "nothing was changed" if edit is None else str(edit)
        self._is_false = edit is not None
        self.relay.begin(edit)
        self._begin(waits.patience_s if edit is None else JOIN_S)

    def go_on(self) -> list[Ended]:
        """From there to its end: how the victim's calls have ended."""
        plain, faults = self._go_on(CALL_S if self._is_false else waits.patience_s)
        calls = [Ended(**call) for call in plain]
        breaches = [breach for call in calls if (breach := call.breach())] + faults
        assert not breaches, f"{self._said}, and then: {'; '.join(breaches)}"
        return calls

    def end(self) -> None:
        """The last of them is over: the victim has kept nothing."""
        self.relay.begin()
        self._child.send(["end"])
        grown = self._child.result(waits.patience_s + 3 * SLACK_S)
        assert not grown, grown

    # -- for subclasses ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _begin(self, join_s: float) -> None:
        """The two ends join."""

    @abc.abstractmethod
    def _go_on(self, call_s: float) -> Any:
        """The victim's report: calls and faults."""

    @abc.abstractmethod
    def _wanted(self) -> list[Any]:
        """What is to be received, described in plain values."""

    def _answer(self) -> Any:
        """What the victim's process says next."""
        try:
            return self._child.recv(waits.patience_s + 4 * SLACK_S)
        except peers.ChildError:
            raise
        except KvplugError as e:
            raise AssertionError(
                f"{self._said}, and then the other end's process did not live on: {e}"
            ) from e

    def _check_order(self, calls: list[Ended], *, complete: bool = False) -> None:
        """Of a stream that was cut, or not changed, only what was sent is received, in order."""
        wanted = self._wanted()
        got = [call.value for call in calls if call.is_receipt and not call.error]
        assert got == wanted[: len(got)], f"{self._said}, and then {got} was received where {wanted} was sent"
        assert not complete or len(got) == len(wanted), f"{len(got)} of {len(wanted)} messages were received"
