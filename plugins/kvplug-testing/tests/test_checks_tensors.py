"""The suites as functions: a program without tests of its own judges what it makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

from kvplug.transport import BlockingStore
from kvplug_testing import check_pipe, check_store
from kvplug_testing.memory.options import MemoryPipeOptions, MemoryStoreOptions
from kvplug_testing.memory.pipe import MemoryPipe
from kvplug_testing.memory.store import MemoryStore


def make_pair(context):
    ends = MemoryPipe(context), MemoryPipe(context)
    ends[0].meet(ends[1])
    ends[1].meet(ends[0])
    return ends


class Forgetful(BlockingStore):
    is_shared = False

    def has(self, keys):
        return [False for _ in keys]

    def read(self, key, into):
        return None

    def write(self, key, page):
        return True


def make_store(context):
    return MemoryStore(context)


if __name__ == "__main__":
    level, *laws = sys.argv[1:]
    for make in (make_store, lambda context: make_store(context), lambda context: Forgetful()):
        try:
            card = check_store(make, options_class=MemoryStoreOptions, level=level, laws=laws)
        except AssertionError as e:
            print("broken:", e)
        else:
            print("judged:", *{result.reason or "passed" for result in card.results})
    card = check_pipe(make_pair, options_class=MemoryPipeOptions, level="quick", laws=["PIPE-7"])
    print("pairs:", *{result.outcome for result in card.results})
"""


def _said(folder: Path, *arguments: str) -> str:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, check=False)
    print(done.stdout, done.stderr)
    return done.stdout


def _judged(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("judged:")]


def test_a_program_judges_what_it_makes_and_gets_the_laws_that_are_broken(tmp_path: Path) -> None:
    said = _said(tmp_path, "quick", "STORE-10")
    good, nested = _judged(said)
    assert "passed" in good and "passed" in nested
    broken = said.partition("broken: ")[2]
    assert " tests fail:\n" in broken and ", STORE-10: test_" in broken and "law STORE-10 (" in broken
    assert "pairs:" in said and "passed" in said.partition("pairs:")[2]


@pytest.mark.full
def test_other_processes_make_what_is_judged_if_they_can_import_its_maker(tmp_path: Path) -> None:
    good, nested, *_ = _judged(_said(tmp_path, "long", "ALL-8"))
    assert "passed" in good and "other processes" not in good
    assert "other processes cannot import <lambda>: put it at the top of a file" in nested


@pytest.mark.full
def test_the_law_of_a_dead_peer_is_not_judged_where_no_call_depends_on_one(tmp_path: Path) -> None:
    judged = _judged(_said(tmp_path, "quick", "ALL-2"))
    assert len(judged) == 3
    for said in judged:
        assert "has to fail when another end ends" in said and "passed" not in said
