"""How much memory a process can have, and what is not asked for because it is more."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug.errors import CapacityError
from kvplug.net.memory import room
from kvplug.net.memory.room import MessageLimit, free_memory, memory_limit

PERIODS = itertools.count()


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the limits is in another period, for which they are read anew."""
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: 1000.0 * next(PERIODS)))


@pytest.fixture
def grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, str]], None]:
    """Puts the process into control groups: its own line, and the files of all groups."""

    def put(own: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(room, "_GROUP", tmp_path / "own")
        monkeypatch.setattr(room, "_GROUPS", tmp_path / "fs")
        monkeypatch.setattr(room, "_MEMINFO", tmp_path / "fs" / "meminfo")

    return put


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "4194304\n", "a/b/memory.max": "max\n"}, 4 << 20),
        ("0::/a/b\n", {"a/memory.max": "4194304\n", "a/b/memory.max": "1048576\n"}, 1 << 20),
        ("0::/\n", {"memory.max": "2097152\n"}, 2 << 20),  # a container sees its own group as the root
        ("4:memory,hugetlb:/x\n0::/\n", {"memory/memory.limit_in_bytes": "3145728\n"}, 3 << 20),
    ],
)
def test_the_limits_of_all_control_groups_around_it_count(
    grouped: Any, own: str, files: dict[str, str], limit: int
) -> None:
    grouped(own, files)
    assert memory_limit() == limit


FILES_2 = {"memory.current": "2097152", "memory.stat": "file 9\ninactive_file 1048576"}


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/a/b", {"a/memory.max": "4194304", "a/memory.current": "3145728", "a/b/memory.max": "max"}),
        ("0::/a/b", {"a/b/memory.max": "2097152", "a/b/memory.current": "1048576", "a/memory.max": "max"}),
        ("0::/a", {"a/memory.max": "2097152"} | {f"a/{name}": text for name, text in FILES_2.items()}),
        ("0::/", {"meminfo": "MemTotal: 9000 kB\nMemAvailable:   1024 kB\n"}),
    ],
)
def test_memory_is_free_that_no_group_around_it_and_no_other_program_has_used(
    grouped: Any, own: str, files: dict[str, str]
) -> None:
    grouped(own, files)
    assert free_memory() == 1 << 20


def test_limits_of_the_process_count_at_once() -> None:
    before = memory_limit()
    old = resource.getrlimit(resource.RLIMIT_DATA)
    hard = old[1] if old[1] != resource.RLIM_INFINITY else 1 << 50
    lower = min(before - 4096, hard)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (lower, old[1]))
        assert memory_limit() == lower
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)


def test_more_than_there_can_be_is_refused_with_the_limit_which_an_explicit_one_replaces() -> None:
    MessageLimit().check_size(memory_limit(), "a message")
    with pytest.raises(
        CapacityError, match=f"a message has {1 << 60} bytes, and this process can have at most"
    ):
        MessageLimit().check_size(1 << 60, "a message")
    MessageLimit(1 << 60).check_size(1 << 60, "a message")
    with pytest.raises(CapacityError, match=r"at most 1000 \(max_message_bytes\)"):
        MessageLimit(1000).check_size(1001, "a message")
