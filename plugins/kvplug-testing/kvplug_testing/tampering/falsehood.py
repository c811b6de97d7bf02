"""One message that is changed before it is received."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import attrs

from kvplug import ClosedError, TimeoutError
from kvplug.transport import Deadline

Message = Any
_TICK_S: Final = 0.02


@attrs.frozen
class Falsehood:
    """What becomes of the message with a number."""

    at: int
    seed: int


class Falsifier:
    """What becomes of the messages that come one after the other. Its caller has a lock.

    Args:
        inner: the pipe or channel, which has ``closed``.
        receive: receives from it, with a timeout.
        falsehood: ``None``: nothing is changed.
        changed: another message in the place of one, and a description of the difference.
        end: ends the connection.
    """

    def __init__(
        self,
        inner: Any,
        receive: Callable[[float | None], Message],
        falsehood: Falsehood | None,
        changed: Callable[[Message, random.Random], tuple[Message, str]],
        end: Callable[[], object],
    ) -> None:
        self.ready: deque[Message] = deque()
        """What is received next."""
        self.num_received = 0
        self.said = ""
        """What was changed, in words."""
        self._is_silent = False
        """Nothing more comes."""
        self._inner = inner
        self._receive = receive
        self._falsehood = falsehood
        self._changed = changed
        self._end = end
        self._late: list[Message] = []
        """The message that comes after the next one."""

    def await_message(self, deadline: Deadline) -> None:
        """Wait until something is :attr:`ready`."""
        while not self.ready:
            while self._is_silent:
                if self._inner.closed:
                    raise ClosedError("this end is closed")
                if deadline.expired:
                    raise TimeoutError("nothing came in time")
                time.sleep(_TICK_S)
            self.ready.extend(self._passed_on(self._receive(deadline.remaining())))

    def _passed_on(self, message: Message) -> list[Message]:
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
                what, self._is_silent = "nothing more comes", True
            case 4:
                what = "the connection ends"
                self._end()
            case _:
                other, what = self._changed(message, rng)
                received = [other]
        self.said = f"message {number}: {what}"
        return received
