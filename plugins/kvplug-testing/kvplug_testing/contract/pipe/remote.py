"""Functions that run in other processes in the tests of pipes: each takes ``(parent, pipe, ...)``, or a
listener.

See :meth:`kvplug_testing.contract.pipe.suite.PipeSuite.remote_pipe`.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

from kvplug.transport import Pipe, PipeListener
from kvplug_testing.comparison import difference
from kvplug_testing.pairs import echo, wait as wait
from kvplug_testing.peers import Parent

_BLOCK = (1 << 20) + 7


@cache
def _noise() -> Any:
    import torch

    block = torch.randint(0, 256, (_BLOCK,), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    return block.repeat(2)


def content(number: int, nbytes: int) -> Any:
    """Message ``number``: bytes that differ from one place to another, and from one message to another."""
    start = number * 4099 % _BLOCK
    if nbytes <= _BLOCK:
        return _noise()[start : start + nbytes].clone()
    return _noise().repeat(nbytes // _BLOCK + 1)[start : start + nbytes]


def unlike(message: Any, number: int, nbytes: int) -> str:
    """A description of how a message differs from message ``number``; empty if it is equal."""
    wrong = difference(content(number, nbytes), message)
    return f"message {number} of {nbytes} bytes: {wrong}" if wrong else ""


def send_without_end(parent: Parent, pipe: Pipe, nbytes: int) -> None:
    """Send numbered messages until it is killed."""
    for number in count():
        pipe.send_tensor(content(number, nbytes), timeout=None)


def hello(parent: Parent, pipe: Pipe, number: int) -> int:
    """Send message ``number``, of 1,000 bytes, and echo."""
    pipe.send_tensor(content(number, 1000))
    return echo(parent, pipe)


def accept_without_end(parent: Parent, listener: PipeListener) -> None:
    """Accept peers, one after the other, and echo until each is gone."""
    while True:
        with listener.accept(timeout=None) as pipe:
            echo(parent, pipe)
