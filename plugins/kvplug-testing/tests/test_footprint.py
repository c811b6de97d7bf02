"""What a process has grown by is seen, whatever was freed before."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

_SCRIPT = """
from kvplug_testing.contract.footprint import Footprint

large = b"x" * (8 << 20)  # after one such block glibc takes smaller ones from its heap, and keeps them
del large
both = [(b"x" * 200_000, b"y" * 3_000) for _ in range(500)]
between = [small for _, small in both]
del both
before = Footprint.taken()
kept = [b"z" * 200_000 for _ in range(int(__import__("sys").argv[1]))]
print(Footprint.taken().growth(before, 250, 1 << 20))
"""


@pytest.mark.parametrize(("count", "grown"), [(200, True), (0, False)])
def test_what_was_freed_before_does_not_hide_what_is_kept(count: int, grown: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(count)], capture_output=True, text=True, timeout=60, check=True
    )
    assert ("bytes of memory more after 250 rounds" in done.stdout) is grown, done.stdout
