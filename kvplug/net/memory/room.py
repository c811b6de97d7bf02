"""How much memory this process can have: what a peer announces is compared with it before memory is taken.

An allocation that is far too large does not always fail. Where the kernel overcommits, it succeeds, and the
process is killed when it uses the memory.
"""

from __future__ import annotations

import functools
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvplug.errors import CapacityError

_ALWAYS_BYTES: Final = 16 << 20
"""No limit of the system is looked at for less."""
_FRESH_S: Final = 10.0
"""How long the limits of the machine and of control groups are kept: reading them takes longer than an
allocation."""
_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")


def memory_limit() -> int:
    """The most bytes that this process can have: the machine's memory, ``RLIMIT_AS``, ``RLIMIT_DATA``, or the
    limit of its control group, whichever is lowest. It may use a part of them already.
    """
    limit = _of_machine(int(time.monotonic() / _FRESH_S))
    for number in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
    return limit


def check_room(nbytes: int, what: str, most: int | None = None) -> None:
    """Whether memory may be asked for, for what a peer has announced. ``what`` names it in the error.

    Args:
        most: The most bytes to accept; ``None``: as many as this process can have.

    Raises:
        CapacityError: it is too large. Names the limit.
    """
    if most is not None:
        if nbytes > most:
            raise CapacityError(
                f"{what} has {nbytes} bytes, and memory is taken for at most {most} (max_message_bytes)"
            )
    elif nbytes > _ALWAYS_BYTES and nbytes > (limit := memory_limit()):
        raise CapacityError(f"{what} has {nbytes} bytes, and this process can have at most {limit}")


@functools.lru_cache(maxsize=1)
def _of_machine(_: int) -> int:
    """Read once in each period."""
    return min((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits_of_groups()))


def _limits_of_groups() -> Iterator[int]:
    """Of this process's control group and of those around it (version 2, or 1's memory controller)."""
    try:
        lines = _GROUP.read_text().splitlines()
    except OSError:  # no Linux, or no /proc
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = root / path.lstrip("/")
        for group in (inner, *inner.parents):
            yield from _limit_in(group / name)
            if group == root:
                break


def _limit_in(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:  # the root has no limit, and a container may show only its own group, as the root
        return
    if text.isdigit():  # otherwise "max"
        yield int(text)
