"""Which messages a fault hits: a pure function of the plan, message numbers and sizes, without a clock. And a
warning where none was hit."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable

import attrs

from kvplug_testing.faults.plan import Plan, Rule

_log = logging.getLogger(__name__)


@attrs.frozen
class Injection:
    """One rule and one message that it hits."""

    rule: Rule
    """The rule that hits the message."""
    position: int
    """The rule's position in the plan, from 1."""
    number: int
    """The number of the message, as the rule counts."""
    seed: int
    """The plan's."""

    def __str__(self) -> str:
        return f"rule {self.position} ({self.rule.do}), message {self.number}"

    def random(self) -> random.Random:
        """The random numbers of this message: the same for the same seed, rule and number."""
        return _random(self.seed, self.position, self.number, self.rule.do)


class FaultSchedule:
    """The faults of a plan for the messages of one direction of one pipe, one after another."""

    def __init__(self, plan: Plan, direction: str, pipe: int = 1) -> None:
        self._seed = plan.seed
        self._rules = [
            (position, rule)
            for position, rule in enumerate(plan.rules, start=1)
            if rule.direction == direction and rule.pipe in (None, pipe)
        ]
        self._counted = dict.fromkeys((position for position, _ in self._rules), 0)
        self._hit = dict(self._counted)
        self._passed = 0

    def __bool__(self) -> bool:
        """Whether any rule is for this direction of this pipe."""
        return bool(self._rules)

    def hits(self, nbytes: int | None) -> list[Injection]:
        """The rules that hit the next message, in the plan's order; does not count it.

        ``nbytes``: its size; if it is unknown (``None``), returns all rules that could hit it.
        """
        return [
            Injection(rule, position, self._counted[position] + 1, self._seed)
            for position, rule in self._rules
            if (nbytes is None or nbytes >= rule.min_bytes) and self._is_hit(rule, position)
        ]

    def advance(self, nbytes: int) -> list[Injection]:
        """Count the next message, of this size; returns the rules that hit it."""
        hits = self.hits(nbytes)
        for hit in hits:
            self._hit[hit.position] += 1
        for position, rule in self._rules:
            self._counted[position] += nbytes >= rule.min_bytes
        self._passed += nbytes
        return hits

    def _is_hit(self, rule: Rule, position: int) -> bool:
        number = self._counted[position] + 1
        if rule.times is not None and self._hit[position] >= rule.times:
            return False
        if rule.message is not None and number != rule.message:
            return False
        if rule.every is not None and number % rule.every:
            return False
        if rule.after is not None and self._passed < rule.after:
            return False
        return rule.probability >= 1 or _random(self._seed, position, number).random() < rule.probability


class PlanRecord:
    """What the pipes of one plan have met, together.

    It warns once, when the last of them ends and no fault has happened: the plan does not do what it was
    written for.
    """

    def __init__(self, plan: Plan) -> None:
        self.numbers = itertools.count(1)
        """Numbers for these pipes."""
        self._num_rules = len(plan.rules)
        self._pipes: set[object] = set()
        self._num_messages = self._largest = 0
        self._is_silent = not plan.rules

    def begin(self, pipe: object) -> None:
        """A pipe was made."""
        self._pipes.add(id(pipe))

    def count(self, nbytes: int) -> None:
        """A message of this size passed, in a direction of the rules."""
        self._num_messages += 1
        self._largest = max(self._largest, nbytes)

    def happened(self) -> None:
        """A fault has happened."""
        self._is_silent = True

    def end(self, pipe: object) -> None:
        """A pipe was closed; it may have been before."""
        self._pipes.discard(id(pipe))
        if not self._pipes and not self._is_silent:
            self._is_silent = True
            _log.warning(
                "no planned fault has happened in this process: rules %d, messages %d, the largest"
                " of %d bytes; KV that processes of one host map crosses no pipe"
                " (options.host.map = false sends it)",
                self._num_rules,
                self._num_messages,
                self._largest,
            )


def schedule(
    plan: Plan, sizes: Iterable[int], direction: str = "send", pipe: int = 1
) -> tuple[tuple[Injection, ...], ...]:
    """The faults of each of these messages, if none breaks the pipe."""
    course = FaultSchedule(plan, direction, pipe)
    return tuple(tuple(course.advance(nbytes)) for nbytes in sizes)


def _random(*of: int | str) -> random.Random:
    # From text, which Python hashes the same way in every process.
    return random.Random(" ".join(str(each) for each in ("kvplug", *of)))
