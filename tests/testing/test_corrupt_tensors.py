"""The pipe that flips bits: which, how many, and that it is the same ones again."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplug import DEFAULT_TIMEOUT, ClosedError, Pipe, Timeout, Transfer  # noqa: E402 - after the skip
from kvplug.testing.corrupt import CorruptingPipe  # noqa: E402


class Shelf(Pipe):
    """Keeps what is sent, and gives it back in order."""

    peer = "nobody"
    closed = False

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def send_tensor(self, tensor: Any, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        self.kept.append(tensor)
        transfer = Transfer(0)
        transfer.finish()
        return transfer

    def recv_tensor(self, out: Any = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        return self.kept.pop(0)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.closed = True

    def abort(self) -> None:
        raise ClosedError


def flipped(a: Any, b: Any) -> int:
    changed = a.view(torch.uint8).flatten() ^ b.view(torch.uint8).flatten()
    return sum(bin(byte).count("1") for byte in changed.tolist())


def test_large_tensors_arrive_changed_and_the_source_is_untouched() -> None:
    pipe = CorruptingPipe(Shelf(), min_bytes=1000, spacing_bytes=64)
    source = torch.zeros(16, 100)
    pipe.send_tensor(source)
    got = pipe.recv_tensor()
    assert flipped(got, source) == 100
    assert got.shape == source.shape
    assert bool((source == 0).all())
    assert pipe.corrupted == 1


def test_small_tensors_and_none_pass_unchanged() -> None:
    pipe = CorruptingPipe(Shelf(), min_bytes=1000)
    for message in (torch.ones(10), None):
        pipe.send_tensor(message)
    assert bool((pipe.recv_tensor() == 1).all())
    assert pipe.recv_tensor() is None
    assert pipe.corrupted == 0


def test_the_same_seed_flips_the_same_bits() -> None:
    got = []
    for seed in (1, 1, 2):
        pipe = CorruptingPipe(Shelf(), seed=seed)
        pipe.send_tensor(torch.zeros(5000))
        got.append(pipe.recv_tensor().view(torch.int32))
    assert torch.equal(got[0], got[1])
    assert not torch.equal(got[0], got[2])


def test_one_may_say_which_messages_are_hit() -> None:
    pipe = CorruptingPipe(Shelf(), which=lambda number: number == 1)
    for _ in range(3):
        pipe.send_tensor(torch.zeros(5000, dtype=torch.bfloat16))
    assert [flipped(pipe.recv_tensor(), torch.zeros(5000, dtype=torch.bfloat16)) > 0 for _ in range(3)] == [
        False,
        True,
        False,
    ]


def test_a_large_tensor_costs_a_bounded_number_of_flips() -> None:
    pipe = CorruptingPipe(Shelf(), spacing_bytes=1)
    pipe.send_tensor(torch.zeros(1_000_000, dtype=torch.uint8))
    assert 0 < flipped(pipe.recv_tensor(), torch.zeros(1_000_000, dtype=torch.uint8)) <= 4096


def test_everything_else_is_the_wrapped_pipe() -> None:
    shelf = Shelf()
    pipe = CorruptingPipe(shelf)
    assert pipe.peer == "nobody"
    pipe.close()
    assert pipe.closed
    with pytest.raises(ClosedError):
        pipe.abort()
