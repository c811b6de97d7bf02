"""One message that is changed before it is received."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

Message = Any

CHANGES: Final[Sequence[str]] = (
    *("it says something else",) * 8,
    "it does not come",
    "it comes twice",
    "it comes after the next one",
    "nothing more comes",
    "the connection ends",
)


@attrs.frozen
class Falsehood:
    """What becomes of the message with a number."""

    at: int
    seed: int
    only: str = ""
    """The name of one of the changes; empty: any."""


class Falsifier:
    """What becomes of the messages that come one after the other. Its caller has a lock.

    Args:
        falsehood: ``None``: nothing is changed.
        changed: another message in the place of one, and what is different, in words.
        end: ends the connection.
    """

    def __init__(
        self,
        falsehood: Falsehood | None,
        changed: Callable[[Message, random.Random], tuple[Message, str]],
        end: Callable[[], object],
    ) -> None:
        self.num_received = 0
        self.said = ""
        """What was changed, in words."""
        self.is_silent = False
        """Nothing more comes."""
        self._falsehood = falsehood
        self._changed = changed
        self._end = end
        self._held: Callable[[Message], list[Message]] | None = None
        """What to do with the message after the one that was reached."""

    def passed_on(self, message: Message) -> list[Message]:
        """What is received in the place of the next message."""
        number, self.num_received = self.num_received, self.num_received + 1
        held, self._held = self._held, None
        if held is not None:
            return held(message)
        if self._falsehood is None or self._falsehood.at != number:
            return [message]
        rng = random.Random(self._falsehood.seed)
        what = self._falsehood.only or rng.choice(CHANGES)
        self.said = f"message {number}: {what}"
        match what:
            case "it does not come":
                return []
            case "it comes twice":
                return [message, message]
            case "it comes after the next one":
                self._held = lambda following: [following, message]
                return []
            case "nothing more comes":
                self.is_silent = True
                return []
            case "the connection ends":
                self._end()
                return []
        other, words = self._changed(message, rng)
        self.said = f"message {number}: {words}"
        return [other]
