"""The pipe "faulty" injects what its rules say, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplug import TimeoutError  # noqa: E402
from kvplug.transport import Credentials, Pipe, PipeContext  # noqa: E402
from kvplug_lab.faults import FaultyEndpoint, Rule  # noqa: E402
from kvplug_testing.memory.options import MemoryPipeOptions  # noqa: E402
from kvplug_testing.memory.pipe import MemoryEndpoint  # noqa: E402
from kvplug_testing.waits import Call, raises  # noqa: E402

MIB = 1 << 20
Pair = Callable[..., tuple[Pipe, Pipe]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """``pair("flip message=1", ...)``: a pipe with these rules, and its other end."""
    made: list[Pipe] = []

    def make(*rules: str) -> tuple[Pipe, Pipe]:
        inner = MemoryEndpoint(PipeContext(options=MemoryPipeOptions(), credentials=Credentials()))
        endpoint = FaultyEndpoint(inner, [Rule.parsed(rule) for rule in rules])
        with contextlib.closing(inner.listen()) as listener:
            connecting = Call(lambda: endpoint.connect(listener.contact))
            made.extend([listener.accept(5), connecting.result()])
        return made[-1], made[-2]

    yield make
    for pipe in made:
        pipe.abort()


def tensor(number: int, nbytes: int = 64) -> Any:
    return torch.full((nbytes,), number, dtype=torch.uint8)


def send(pipe: Pipe, *numbers: int) -> None:
    for number in numbers:
        pipe.send_tensor(tensor(number), timeout=5)


def received(pipe: Pipe, count: int) -> list[int]:
    return [int(pipe.recv_tensor(timeout=5)[0]) for _ in range(count)]  # type: ignore[index]


@pytest.mark.parametrize(
    ("rules", "arrive"),
    [
        ([], [1, 2, 3, 4]),
        (["drop message=2"], [1, 3, 4]),
        (["duplicate message=2"], [1, 2, 2, 3, 4]),
        (["swap message=2"], [1, 3, 2, 4]),
        (["drop after=128"], [1, 2]),
        (["drop min_bytes=65"], [1, 2, 3, 4]),
    ],
)
def test_messages_are_lost_doubled_and_swapped(pair: Pair, rules: list[str], arrive: list[int]) -> None:
    near, far = pair(*rules)
    send(near, 1, 2, 3, 4)
    assert received(far, len(arrive)) == arrive
    raises(TimeoutError, lambda: far.recv_tensor(timeout=0.05))


def test_so_many_bits_are_flipped_and_the_caller_s_tensor_is_unchanged(pair: Pair) -> None:
    near, far = pair("flip message=2 bits=9 min_bytes=100")
    source = torch.randn(50, 3, dtype=torch.bfloat16).t()
    for message in (source, tensor(0, 8), None, source):
        near.send_tensor(message, timeout=5)
    first, small, none, second = (far.recv_tensor(timeout=5) for _ in range(4))
    assert torch.equal(first, source) and torch.equal(small, tensor(0, 8)) and none is None
    changed = second.view(torch.uint8) ^ source.contiguous().view(torch.uint8)
    assert sum(byte.bit_count() for byte in changed.flatten().tolist()) == 9
