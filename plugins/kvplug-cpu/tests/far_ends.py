"""What the other process does in the tests of the pipe "cpu". Each takes (parent, pipe, ...)."""

from __future__ import annotations

from typing import Any

import torch

from kvplug import PeerGoneError
from kvplug.transport import Pipe
from kvplug_testing.peers import Parent


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


def send_part(parent: Parent, pipe: Any, nbytes: int, before_death: int) -> None:
    """One whole message, then ``before_death`` bytes of one of ``nbytes`` bytes on its connections."""
    from kvplug_cpu.message import Content, parts

    pipe.send_tensor(torch.arange(10)).wait()
    content = Content.of(torch.ones(nbytes, dtype=torch.uint8), pipe._split_bytes)
    bounds = parts(nbytes, len(pipe._data)) if content.split else [(0, nbytes)]
    streams = [bytes(content.memory[a:b]) for a, b in bounds]
    streams[0] = content.prefix + streams[0]
    for connection, stream in zip(pipe._data, streams, strict=False):
        left = memoryview(stream[:before_death])
        while left:
            left = left[connection.send([left]) :]
        before_death = max(0, before_death - len(stream))
    parent.send("sent")
    parent.recv()
