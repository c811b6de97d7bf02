"""A file of made-up mutants, for the tests of what judges them."""

from __future__ import annotations

from pathlib import Path

from judging import FOLDER

MADE_UP = """
import os
import threading

import pytest

from kvplug.transport import Kind
from kvplug_testing import law
from kvplug_testing.waits import Call
from kvplug_testing.contract.base import Contract


class Made(Contract):
    kind = Kind.PIPE
    breaks = ("PIPE-1", "ALL-7")
    prepare = work = lambda self: None

    @pytest.fixture
    def ready(self):
        return self.prepare()

    @law("PIPE-1")
    def test_that_works(self, ready):
        Call(self.work).result()

    @law("ALL-7")
    def test_that_leaves_nothing(self, ready):
        Call(self.work).result()


class TestIsWrong(Made):
    def work(self):
        assert 1 + 1 == 3


class TestIsMisspelt(Made):
    def work(self):
        self.wrok()


class TestIsMisspeltWhereThatMeansAnother(Made):
    def work(self):
        try:
            self.wrok()
        except AttributeError as e:
            raise AssertionError("ValueError was expected") from e


class TestIsMisspeltInAThread(Made):
    def work(self):
        thread = threading.Thread(target=lambda: self.wrok())
        thread.start()
        thread.join()
        raise AssertionError("nothing came")


class TestRaisesWhatNobodyKnows(Made):
    def work(self):
        {}["nothing"]


class TestCannotBePrepared(Made):
    def prepare(self):
        raise AssertionError("too early")


class TestLeavesSomething(Made):
    def work(self):
        self.left = os.dup(0)


class TestHasNoFault(Made):
    breaks = ()
    is_control = True
"""
ALONE = """

class TestIsAlone(Contract):
    kind = Kind.PIPE
    breaks = ("PIPE-1",)

    @law("PIPE-1")
    def test_that_works(self):
        assert 1 + 1 == 3
"""


def made_up(folder: Path, more: str = "") -> Path:
    """A file of mutants, in a folder that is judged as theirs is."""
    (folder / "conftest.py").write_text((FOLDER / "conftest.py").read_text())
    path = folder / "made_up.py"
    path.write_text(MADE_UP + more)
    return path
