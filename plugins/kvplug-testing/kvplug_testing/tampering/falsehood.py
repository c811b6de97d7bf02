"""One message that is changed before it is received."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs

Message = Any


@attrs.frozen
class Falsehood:
    """What becomes of the message with a number."""

    at: int
    seed: int


class Falsifier:
    """What becomes of the messages that come one after the other. Its caller has a lock.

    Args:
        falsehood: ``None``: nothing is changed.
        changed: another message in the place of one, and a description of the difference.
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
        self._late: list[Message] = []
        """The message that comes after the next one."""

    def passed_on(self, message: Message) -> list[Message]:
        """What is received in the place of the next message."""
        number, self.num_received = self.num_received, self.num_received + 1
        late, self._late = self._late, []
        if self._falsehood is None or self._falsehood.at != number:
            return [message, *late]
        rng = random.Random(self._falsehood.seed)
        received: list[Message] = []
        match rng.randrange(13):
            case 0:
                what = "it does not come"
            case 1:
                what, received = "it comes twice", [message, message]
            case 2:
                what, self._late = "it comes after the next one", [message]
            case 3:
                what, self.is_silent = "nothing more comes", True
            case 4:
                what = "the connection ends"
                self._end()
            case _:
                other, what = self._changed(message, rng)
                received = [other]
        self.said = f"message {number}: {what}"
        return received
