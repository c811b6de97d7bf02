"""What the other process does in the tests of the pipe "cpu". Each takes (parent, pipe, ...)."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from kvplug import ClosedError, PeerGoneError, Pipe
from kvplug.testing.peers import Parent


def echo(parent: Parent, pipe: Pipe) -> int:
    """Sends back what comes, until the other side has gone."""
    count = 0
    while True:
        try:
            message = pipe.recv_tensor()
        except PeerGoneError:
            return count
        pipe.send_tensor(message)
        count += 1


def wait(parent: Parent, pipe: Pipe) -> None:
    """Does nothing with the pipe until told to go."""
    parent.send("here")
    parent.recv()


def send_numbers(parent: Parent, pipe: Pipe, count: int, nbytes: int) -> None:
    """Sends ``count`` tensors full of their own number; says so before and after."""
    for number in range(count):
        pipe.send_tensor(torch.full((nbytes,), number % 251, dtype=torch.uint8))
    pipe.close()


def both_ways(parent: Parent, pipe: Pipe, count: int, nbytes: int) -> bool:
    """Sends numbered tensors from one thread while it receives some in another, and checks the order."""

    def send() -> None:
        for number in range(count):
            pipe.send_tensor(torch.full((nbytes * (number % 3) + 8,), number % 251, dtype=torch.uint8))

    thread = threading.Thread(target=send)
    thread.start()
    good = True
    for number in range(count):
        got = pipe.recv_tensor()
        good = good and got is not None and got.numel() == nbytes * (number % 3) + 8
        good = good and bool((got == number % 251).all())
    thread.join()
    parent.send("all received")
    parent.recv()
    return good


def send_part(parent: Parent, pipe: Any, nbytes: int, before_death: int) -> None:
    """One whole message, then ``before_death`` bytes of one of ``nbytes`` bytes on its lanes."""
    from kvplug_cpu.message import Content, parts

    pipe.send_tensor(torch.arange(10)).wait()
    content = Content.of(torch.ones(nbytes, dtype=torch.uint8), pipe._split_bytes)
    bounds = parts(nbytes, len(pipe._lanes)) if content.split else [(0, nbytes)]
    streams = [bytes(content.memory[a:b]) for a, b in bounds]
    streams[0] = content.prefix + streams[0]
    for lane, stream in zip(pipe._lanes, streams, strict=False):
        left = memoryview(stream[:before_death])
        while left:
            left = left[lane.send([left]) :]
        before_death = max(0, before_death - len(stream))
    parent.send("sent")
    parent.recv()


def fork_and_look(parent: Parent, pipe: Any) -> list[Any]:
    """In a forked child every call raises and no socket is left; the parent's pipe goes on."""
    before = {os.readlink(f"/proc/self/fd/{lane._sock.fileno()}") for lane in pipe._lanes}
    before.add(os.readlink(f"/proc/self/fd/{pipe._control.sock.fileno()}"))
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for call in (lambda: pipe.send_tensor(None), lambda: pipe.recv_tensor(timeout=1)):
            try:
                call()
                said.append("nothing")
            except ClosedError:
                said.append("ClosedError")
        pipe.close()
        pipe.abort()
        open_now = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit()
                    and os.path.exists(f"/proc/self/fd/{fd}")}  # fmt: skip
        said.append(str(len(before & open_now)))
        os.write(writable, ",".join(said).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(readable, 1000).decode()
    pipe.send_tensor(torch.ones(3))
    echoed = pipe.recv_tensor(timeout=10)
    return [text, echoed is not None]


def fork_and_die(parent: Parent, pipe: Pipe) -> None:
    """Leaves a forked grandchild behind that lives on for a while."""
    pid = os.fork()
    if pid == 0:
        time.sleep(15)
        os._exit(0)
    parent.send(pid)
    parent.recv()


def be_slow(parent: Parent, pipe: Pipe, pause: float) -> int:
    """Receives with a pause before each message."""
    count = 0
    try:
        while True:
            time.sleep(pause)
            pipe.recv_tensor()
            count += 1
    except PeerGoneError:
        return count
