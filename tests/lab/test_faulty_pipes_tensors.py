"""A pipe with faults inverts the bits that its rules name, and nothing else."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from kvplug.transport import Credentials, PipeEndpoint  # noqa: E402
from kvplug_lab.faults import FaultyPipe, Rule  # noqa: E402
from kvplug_testing.memory.options import MemoryPipeOptions  # noqa: E402
from kvplug_testing.memory.pipe import MemoryEndpoint  # noqa: E402
from kvplug_testing.waits import Call  # noqa: E402


def test_so_many_bits_are_flipped_and_the_caller_s_tensor_is_unchanged() -> None:
    endpoint = MemoryEndpoint(PipeEndpoint.Context(options=MemoryPipeOptions(), credentials=Credentials()))
    rules = [Rule.parsed("flip message=2 bits=9 min_bytes=100")]
    source = torch.randn(50, 3, dtype=torch.bfloat16).t()
    little = torch.zeros(8, dtype=torch.uint8)
    with contextlib.closing(endpoint.listen()) as listener:
        connecting = Call(lambda: FaultyPipe(endpoint.connect(listener.contact), rules))
        with contextlib.closing(listener.accept(5)) as far, contextlib.closing(connecting.result()) as near:
            for message in (source, little, None, source):
                near.send_tensor(message, timeout=5)
            first, small, none, second = (far.recv_tensor(timeout=5) for _ in range(4))
    assert torch.equal(first, source) and torch.equal(small, little) and none is None
    changed = second.view(torch.uint8) ^ source.contiguous().view(torch.uint8)
    assert sum(byte.bit_count() for byte in changed.flatten().tolist()) == 9
