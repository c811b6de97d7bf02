"""A plugin author's folder, and runs of pytest in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
from kvplug.transport import Kind
from kvplug_testing import law
from kvplug_testing.contract.base import Contract

class TestMine(Contract):
    kind = Kind.PIPE
    transport = "memory"
    across_processes = False
    settle_s = 0.2

    @law("PIPE-1")
    def test_that_is_kept(self):
        pass

    @law("PIPE-5", "PIPE-6")
    def test_that_is_broken(self):
        assert 1 + 1 == 3, "two and a half came"

    @law("PIPE-7", needs="other_processes")
    def test_of_what_is_not_claimed(self):
        raise AssertionError("it ran")

    @law("PIPE-1")
    def test_that_is_waived(self):
        raise AssertionError("not yet")

    @law("PIPE-1")
    def test_that_is_kept_but_waived(self):
        pass

    @law("ALL-4", level="long")
    def test_that_takes_longer(self):
        pass

    @law("ALL-7")
    def test_that_leaves_something(self):
        import os
        self.left = os.dup(0)
        raise AssertionError("a call is still blocked")

    waivers = {"test_that_is_waived": "see issue 12", "test_that_is_kept_but_waived": "nothing keeps it"}
"""


class Package:
    """A plugin author's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tests").mkdir()
        (folder / "tests" / "test_mine.py").write_text(SUITE)

    def judge(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"},
        )


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)
