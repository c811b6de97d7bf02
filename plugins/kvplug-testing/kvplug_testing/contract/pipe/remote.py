"""The functions of other processes in the tests of pipes: each takes ``(parent, pipe, ...)``, or a listener.

They run in a child; :meth:`kvplug_testing.contract.pipe.suite.PipeSuite.remote_pipe` says how.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

from kvplug.transport.pipe import Pipe, PipeListener, Transfer
from kvplug_testing import peers
from kvplug_testing.contract.pipe.footprint import Footprint
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
    """How a message is not message ``number``, in words; empty if it is."""
    if message is None or message.numel() != nbytes:
        size = "None" if message is None else f"{message.numel()} bytes"
        return f"{size} came where message {number} of {nbytes} bytes was next"
    wrong = (message != content(number, nbytes)).nonzero()
    if len(wrong):
        return f"message {number} of {nbytes} bytes has {len(wrong)} wrong ones, the first at {int(wrong[0])}"
    return ""


# -- what a peer does ------------------------------------------------------------------------------


def leave(parent: Parent, pipe: Pipe) -> None:
    """End at a word, and end nothing properly."""
    parent.send("here")
    parent.recv(None)
    os._exit(0)


def leave_a_child(parent: Parent, pipe: Pipe) -> None:
    """Leave a process behind that holds every descriptor of this one, and says its pid.

    The fork is the C library's own, which no hook of Python's sees, as in a library of
    another language.
    """
    import ctypes

    libc = ctypes.PyDLL(None)
    pid = libc.fork()
    if pid == 0:
        libc.sleep(120)
        libc._exit(0)
    parent.send(pid)
    parent.recv(None)


def fork_and_echo(parent: Parent, pipe: Pipe) -> None:
    """Leave a forked child that does nothing, say its pid, and send back what comes."""
    import time
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about threads
        pid = os.fork()
    if pid == 0:
        time.sleep(120)
        os._exit(0)
    parent.send(pid)
    echo(parent, pipe)


def echo_and_look(parent: Parent, pipe: Pipe) -> None:
    """At a word, send back the next message, or say what this process holds."""
    while True:
        if parent.recv(None) == "echo":
            pipe.send_tensor(pipe.recv_tensor(timeout=None)).wait()
        else:
            parent.send(Footprint.taken().plain())


def send(parent: Parent, pipe: Pipe, sizes: list[int]) -> None:
    """A message of each size, numbered from 0. Says so when the last one has left, and waits."""
    transfers = [pipe.send_tensor(content(number, nbytes)) for number, nbytes in enumerate(sizes)]
    parent.send("queued")
    for transfer in transfers:
        transfer.wait()
    parent.send("sent")
    parent.recv(None)


def send_without_end(parent: Parent, pipe: Pipe, nbytes: int, count: str, singly: bool) -> None:
    """Numbered messages, for as long as it lives. The file ``count`` says how many it has begun to send.

    Where they go ``singly``, none is begun before the transfer of the one before it is done.
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
    """What is wrong with numbered messages of these sizes; empty if nothing is."""
    parent.send("here")
    parent.recv(None)
    for number, nbytes in enumerate(sizes):
        wrong = unlike(pipe.recv_tensor(), number, nbytes)
        if wrong:
            return wrong
    return ""


def both_ways(parent: Parent, pipe: Pipe, count: int, nbytes: int) -> str:
    """Send numbered messages while those of the other end arrive; what is wrong with them."""
    wrong = exchange(pipe, count, nbytes)
    parent.send("received")
    parent.recv(None)  # or what it sent last would be on its way while it goes
    return wrong


def exchange(pipe: Pipe, count: int, nbytes: int) -> str:
    """One end of :func:`both_ways`: ``count`` messages out of one thread and into another.

    Their sizes vary: that of message n is :func:`size_of` it.
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
    """Of message ``number`` of an exchange: small and large in turn."""
    return (1, nbytes, nbytes // 7, 0, 3 * nbytes)[number % 5]


def hello(parent: Parent, pipe: Pipe, number: int) -> None:
    """Message ``number``, of 1,000 bytes, and its echo."""
    pipe.send_tensor(content(number, 1000)).wait()
    pipe.recv_tensor(timeout=None)


# -- what a listener does --------------------------------------------------------------------------


def accept_one(parent: Parent, listener: PipeListener) -> int:
    """Echo to the first peer that connects."""
    with listener.accept(timeout=None) as pipe:
        return echo(parent, pipe)


def accept_without_end(parent: Parent, listener: PipeListener) -> None:
    """Echo to one after the other. In between, at a word, say what this process holds."""
    while True:
        word = parent.recv(None)
        if word == "accept":
            with listener.accept(timeout=None) as pipe:
                echo(parent, pipe)
            parent.send("ended")
        else:
            parent.send(Footprint.taken().plain())
