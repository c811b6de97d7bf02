"""The CPUs of kvplug's threads, in programs whose threads are bound as engines bind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplug.net.affinity import format_cpus, parse_cpus

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="a thread is bound to one of several CPUs")
ALL, ONE, OTHER = CPUS, CPUS[:1], CPUS[1:2]

TELL = f"""
import json, os, sys, threading
ONE, OTHER = {ONE}, {OTHER}

def cpus():
    return sorted(os.sched_getaffinity(0))

def in_thread():
    from kvplug.transport import BackgroundThread
    found = []
    thread = BackgroundThread(lambda: found.append(cpus()), name="kvplug test", stop=lambda: None)
    thread.start()
    thread.join()
    return found[0]

def configured(**keys):
    from kvplug import Config, Registry, build_connector
    from kvplug.assembly.resolve import ResolvedConfig
    ResolvedConfig.to_build(Config.from_dict(keys), Registry())
    return in_thread()

def tell(**what):
    print(json.dumps(what))
"""


def told(program: str, *, bound: list[int] | None = None, folder: Path | None = None) -> dict[str, list[int]]:
    """What a program prints that begins with ``TELL``. ``bound``: as taskset would."""
    command = [sys.executable, "-c", TELL + program]
    if folder is not None:  # multiprocessing imports the program again in its children
        path = folder / "program.py"
        path.write_text(TELL + program)
        command = [sys.executable, str(path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=None if bound is None else lambda: os.sched_setaffinity(0, bound),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


def test_a_thread_has_the_cpus_that_the_program_had_before_its_main_thread_was_bound() -> None:
    found = told(
        """
import kvplug.transport
kvplug.transport.BackgroundThread  # imports it
os.sched_setaffinity(0, ONE)
tell(thread=in_thread(), main=cpus())
"""
    )
    assert found == {"thread": ALL, "main": ONE}


def test_a_thread_has_the_cpus_of_all_threads_of_a_program_whose_main_thread_was_bound_before() -> None:
    found = told(
        """
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()  # before, as one that an engine has
os.sched_setaffinity(0, ONE)
tell(thread=in_thread(), main=cpus())
ended.set()
"""
    )
    assert found == {"thread": ALL, "main": ONE}


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_worker_that_its_engine_has_bound_takes_the_cpus_of_the_engine(method: str, tmp_path: Path) -> None:
    """As vLLM's workers, which OpenMP binds before they import anything of kvplug's."""
    found = told(
        f"""
def work(pipe):
    os.sched_setaffinity(0, ONE)
    pipe.send([in_thread(), cpus()])

if __name__ == "__main__":
    import multiprocessing
    context = multiprocessing.get_context({method!r})
    ours, theirs = context.Pipe()
    worker = context.Process(target=work, args=(theirs,))
    worker.start()
    thread, main = ours.recv()
    worker.join()
    tell(thread=thread, main=main)
""",
        folder=tmp_path,
    )
    assert found == {"thread": ALL, "main": ONE}


def test_a_program_that_was_restricted_from_outside_stays_within_that() -> None:
    found = told("tell(thread=in_thread(), main=cpus())", bound=ONE)
    assert found == {"thread": ONE, "main": ONE}


def test_a_config_may_say_which_cpus() -> None:
    found = told(
        f"""
import kvplug.net.affinity
os.sched_setaffinity(0, ONE)
said = {{wanted: configured(thread_cpus=wanted) for wanted in ("{OTHER[0]}", "all", "inherit")}}
tell(**said)
"""
    )
    assert found == {str(OTHER[0]): OTHER, "all": OTHER, "inherit": ONE}, "the default changes nothing"


def test_cpus_that_the_process_may_not_use_are_refused_by_name() -> None:
    found = told(
        """
try:
    configured(thread_cpus="9000-9002")
except Exception as e:
    tell(error=f"{type(e).__name__}: {e}", main=cpus())
"""
    )
    error, main = found["error"], found["main"]
    assert "ConfigError" in error
    assert "thread_cpus: '9000-9002' was given" in error
    assert f"it may use {format_cpus(frozenset(ALL))}" in error
    assert main == ALL


def test_threads_of_a_library_have_the_same_and_the_caller_keeps_its_own() -> None:
    found = told(
        """
from kvplug.transport import thread_cpus
os.sched_setaffinity(0, ONE)
found = []
with thread_cpus():
    thread = threading.Thread(target=lambda: found.append(cpus()))
    thread.start()
    thread.join()
tell(library=found[0], main=cpus())
"""
    )
    assert found == {"library": ALL, "main": ONE}


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("2,4-5", {2, 4, 5}), ("1,0", {0, 1})]
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(format_cpus(frozenset(cpus))) == cpus
    assert format_cpus(frozenset({0, 1, 2, 3, 8})) == "0-3,8"
