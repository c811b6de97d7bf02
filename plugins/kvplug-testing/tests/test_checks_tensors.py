"""The suites as functions: a program without tests of its own judges what it makes."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Parent

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


@pytest.fixture
def output_of(tmp_path: Path, fork_server: ForkServer) -> Callable[..., str]:
    """Run the program with arguments, and return what it prints."""

    def run(*arguments: str) -> str:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        given = (str(program), list(arguments))
        with fork_server.start(f"{__file__}:run_program", *given, timeout_s=100.0) as child:
            printed: str = child.result(100.0)
        print(printed)
        return printed

    return run


def run_program(parent: Parent, program: str, arguments: list[str]) -> str:
    """In a child."""
    sys.argv = [program, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue()


def _judged(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("judged:")]


def test_a_program_judges_what_it_makes_and_gets_the_laws_that_are_broken(
    output_of: Callable[..., str],
) -> None:
    printed = output_of("quick", "STORE-10")
    good, nested = _judged(printed)
    assert "passed" in good and "passed" in nested
    broken = printed.partition("broken: ")[2]
    assert " tests fail:\n" in broken and ", STORE-10: test_" in broken and "law STORE-10 (" in broken
    assert "pairs:" in printed and "passed" in printed.partition("pairs:")[2]


@pytest.mark.full
def test_other_processes_make_what_is_judged_if_they_can_import_its_maker(
    output_of: Callable[..., str],
) -> None:
    good, nested, *_ = _judged(output_of("long", "ALL-8"))
    assert "passed" in good and "other processes" not in good
    assert "other processes cannot import <lambda>: put it at the top of a file" in nested


@pytest.mark.full
def test_the_law_of_a_dead_peer_is_not_judged_where_no_call_depends_on_one(
    output_of: Callable[..., str],
) -> None:
    judged = _judged(output_of("quick", "ALL-2"))
    assert len(judged) == 3
    for line in judged:
        assert "has to fail when another end ends" in line and "passed" not in line
