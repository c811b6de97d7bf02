"""Pipes "shm" that copy straight out of the sender's memory, for tests, and tensors that are sent so."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug_shm.memory.attach import LONGEST_BYTES
from kvplug_shm.memory.huge_pages import in_huge_pages

ends = SimpleNamespace(**run_path(str(Path(__file__).with_name("pipe_ends.py"))))
endpoint, near_pair = ends.endpoint, ends.near_pair

NBYTES = 3 * LONGEST_BYTES + 1000


def huge(nbytes: int, seed: int = 1) -> torch.Tensor:
    """A tensor in huge pages, if the system gives any."""
    memory = mmap.mmap(-1, nbytes + 2**22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 2**21
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[skip : skip + nbytes]
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))
    return tensor


@pytest.fixture(scope="module", autouse=True)
def there_are_huge_pages() -> None:
    tensor = huge(2**22)
    if not in_huge_pages(tensor.data_ptr(), tensor.nbytes):
        pytest.skip("the system gives no huge pages")


@pytest.fixture
def pair(near_pair: Any) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        return near_pair(single_copy=True, **options)

    return make


def unread(pipe: Any) -> int:
    """Bytes in the ring that ``pipe`` reads."""
    return pipe._inbox._ring.end.available()
