"""Functions that run in other processes in the tests of pipes: each takes ``(parent, pipe, ...)``, or a
listener.

See :meth:`kvplug_testing.contract.pipe.suite.PipeSuite.remote_pipe`.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

from kvplug.transport import Pipe, PipeListener, Transfer
from kvplug_testing import peers
from kvplug_testing.comparison import difference
from kvplug_testing.pairs import echo as echo, wait as wait
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


# -- peers -----------------------------------------------------------------------------------------


def send(parent: Parent, pipe: Pipe, sizes: list[int]) -> None:
    """Send a message of each size, numbered from 0. Report the end of the last transfer, and wait."""
    transfers = [pipe.send_tensor(content(number, nbytes)) for number, nbytes in enumerate(sizes)]
    parent.send("queued")
    for transfer in transfers:
        transfer.wait()
    parent.send("sent")
    parent.recv(None)


def send_without_end(parent: Parent, pipe: Pipe, nbytes: int, count: str, singly: bool) -> None:
    """Send numbered messages until it is killed. The file ``count`` holds the number of messages begun.

    With ``singly``, a message begins only after the transfer of the previous one is done.
    """
    begun = os.open(count, os.O_WRONLY)
    parent.send("here")
    number = 0
    while True:
        message = content(number, nbytes)
        number += 1
        os.pwrite(begun, number.to_bytes(8, "little"), 0)
        transfer = pipe.send_tensor(message, timeout=None)
        if singly:
            transfer.wait(None)


def receive(parent: Parent, pipe: Pipe, sizes: list[int]) -> str:
    """Receive numbered messages of these sizes; returns a description of the first error, if any."""
    parent.send("here")
    parent.recv(None)
    for number, nbytes in enumerate(sizes):
        wrong = unlike(pipe.recv_tensor(), number, nbytes)
        if wrong:
            return wrong
    return ""


def both_ways(parent: Parent, pipe: Pipe, count: int, nbytes: int) -> str:
    """Send numbered messages while receiving those of the other end; returns a description of an error in
    them.
    """
    wrong = exchange(pipe, count, nbytes)
    parent.send("received")
    parent.recv(None)  # its last messages may still be in flight
    return wrong


def exchange(pipe: Pipe, count: int, nbytes: int) -> str:
    """One end of :func:`both_ways`: one thread sends ``count`` messages and another receives as many.

    Message n has the size :func:`size_of` (n).
    """
    failures: list[BaseException] = []

    def send_all() -> None:
        try:
            transfers: list[Transfer] = [
                pipe.send_tensor(content(n, size_of(n, nbytes)), timeout=None) for n in range(count)
            ]
            for transfer in transfers:
                transfer.wait()
        except BaseException as e:
            failures.append(e)

    sending = threading.Thread(target=send_all, name="kvplug_testing sender", daemon=True)
    sending.start()
    for number in range(count):
        wrong = unlike(pipe.recv_tensor(), number, size_of(number, nbytes))
        if wrong:
            return wrong
    sending.join(peers.DEFAULT_TIMEOUT_S)
    if sending.is_alive():
        return "the messages in the other direction were never all taken"
    return f"sending ended with {failures[0]!r}" if failures else ""


def size_of(number: int, nbytes: int) -> int:
    """Size of message ``number`` of an exchange: small and large alternate."""
    return (1, nbytes, nbytes // 7, 0, 3 * nbytes)[number % 5]


def hello(parent: Parent, pipe: Pipe, number: int) -> None:
    """Send message ``number``, of 1,000 bytes, and receive its echo."""
    pipe.send_tensor(content(number, 1000)).wait()
    pipe.recv_tensor(timeout=None)


# -- listeners -------------------------------------------------------------------------------------


def accept_without_end(parent: Parent, listener: PipeListener) -> None:
    """On each of the parent's words, accept a peer and echo until it is gone."""
    while True:
        parent.recv(None)
        with listener.accept(timeout=None) as pipe:
            echo(parent, pipe)
