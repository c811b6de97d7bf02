"""Which memory of this process lies in huge pages: what the kernel says of it."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest

from kvplug_shm.memory import huge_pages
from kvplug_shm.memory.huge_pages import in_huge_pages

HUGE = 2**21


def memory(nbytes: int, advice: int) -> tuple[mmap.mmap, int]:
    """Mapped and not touched, and where a huge page of it can begin."""
    made = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(advice)
    address = ctypes.addressof(ctypes.c_char.from_buffer(made))
    return made, (address + HUGE - 1) & -HUGE


@pytest.fixture
def huge() -> tuple[mmap.mmap, int]:
    """Two huge pages, and two that nobody has touched."""
    made, address = memory(4 * HUGE, mmap.MADV_HUGEPAGE)
    for each in range(2):
        ctypes.memset(address + each * HUGE, 1, 1)
    if not in_huge_pages(address, HUGE):
        pytest.skip("the system gives no huge pages, or does not tell of them")
    return made, address


def test_most_of_it_has_to_be(huge: Any) -> None:
    made, address = huge
    assert in_huge_pages(address, 2 * HUGE)
    assert in_huge_pages(address + 5, 2 * HUGE - 100)
    assert in_huge_pages(address, 2 * HUGE + HUGE // 2)
    assert not in_huge_pages(address, 3 * HUGE)
    assert not in_huge_pages(address + 2 * HUGE, HUGE)
    made.madvise(mmap.MADV_DONTNEED)
    assert not in_huge_pages(address, HUGE)


def test_small_pages_are_not() -> None:
    made, address = memory(HUGE, mmap.MADV_NOHUGEPAGE)
    made[:] = b"x" * len(made)
    assert not in_huge_pages(address, HUGE)
    assert not in_huge_pages(4096, HUGE)  # nothing is mapped there


@pytest.mark.parametrize("lacking", ["_PAGEMAP_SCAN", "/proc"])
def test_a_system_that_does_not_tell_means_no(
    huge: Any, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = huge
    if lacking == "/proc":

        def no_file(*_: Any) -> int:
            raise FileNotFoundError

        monkeypatch.setattr(huge_pages.os, "open", no_file)
    else:
        monkeypatch.setattr(huge_pages, lacking, 0xC060661F)
    assert not in_huge_pages(address, HUGE)
