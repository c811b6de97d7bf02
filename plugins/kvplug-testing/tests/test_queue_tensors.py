"""The suite of message queues, over the queue "memory"."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug import TransportError
from kvplug_testing import MessageQueueContract
from kvplug_testing.contract.queue.messages import taken


@pytest.mark.full
class TestMemoryQueue(MessageQueueContract):
    transport = "memory"


class Scripted:
    """A reader's end that gives what it is told to, one after the other."""

    rank = 3

    def __init__(self, *told: int | str) -> None:
        self.told = iter(told)

    def dequeue(self, timeout: float) -> Any:
        match next(self.told):
            case str(text):
                raise TransportError(text)
            case number:
                return number, ""


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ((0, 1, 2, 3, 4), ""),
        ((0, "2 messages were lost", 3, 4), ""),
        ((0, 1, "1 message was lost", 3, "1 message was lost"), ""),
        ((0, 1, 3), "rank 3 got message 3 where 2 was due, in silence"),
        ((0, "1 message was lost", 3), "reader rank 3 got message 3 where 2 was due"),
        ((0, 1, 1), "got message 1 where 2 was due"),
        ((0, "messages were lost", 3), "does not learn how many messages it lost: messages were lost"),
        ((0, 1, 2, "1,000 messages were lost"), "998 more messages were lost than were sent"),
    ],
)
def test_a_loss_that_is_told_exactly_is_no_fault(told: tuple[int | str, ...], fault: str) -> None:
    found = taken(Scripted(*told), 5, 0.0, 1.0)  # type: ignore[arg-type]
    assert fault in found and bool(fault) == bool(found)
