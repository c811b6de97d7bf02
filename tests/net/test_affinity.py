"""The CPUs of kvplug's threads, in programs whose threads are bound as engines bind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvplug import Config, ConfigError, Registry
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.net.affinity import format_cpus

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="a thread is bound to one of several CPUs")
ALL, ONE, OTHER = CPUS, CPUS[:1], CPUS[1:2]
Reported = Callable[..., Any]

PREAMBLE = f"""
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

def report(**what):
    print(json.dumps(what))
"""


@pytest.fixture
def reported(output_of: Callable[..., str]) -> Reported:
    """Runs a program after ``PREAMBLE``, and returns what it reports."""
    return lambda program, **given: json.loads(output_of(PREAMBLE + program, **given))


PROGRAMS = {
    "it was bound after the import": """
import kvplug.transport
kvplug.transport.BackgroundThread  # imports it
os.sched_setaffinity(0, ONE)
report(thread=in_thread(), main=cpus())
""",
    "it was bound before, and has a thread of before": """
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()  # as one that an engine has
os.sched_setaffinity(0, ONE)
report(thread=in_thread(), main=cpus())
ended.set()
""",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_thread_has_the_cpus_that_the_program_had_before_its_main_thread_was_bound(
    program: str, reported: Reported
) -> None:
    assert reported(program) == {"thread": ALL, "main": ONE}


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_worker_that_its_engine_has_bound_takes_the_cpus_of_the_engine(method: str, tmp_path: Path) -> None:
    """As vLLM's workers, which OpenMP binds before they import anything of kvplug's."""
    program = f"""
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
    report(thread=thread, main=main)
"""
    path = tmp_path / "program.py"  # multiprocessing imports it again in its children
    path.write_text(PREAMBLE + program)
    found = subprocess.run([sys.executable, str(path)], capture_output=True, check=True, timeout=60)
    assert json.loads(found.stdout) == {"thread": ALL, "main": ONE}


def test_a_config_may_name_the_cpus(reported: Reported) -> None:
    found = reported(
        f"""
import kvplug.net.affinity
os.sched_setaffinity(0, ONE)
cpus_of = {{wanted: configured(thread_cpus=wanted) for wanted in ("{OTHER[0]}", "all", "inherit")}}
report(**cpus_of)
"""
    )
    assert found == {str(OTHER[0]): OTHER, "all": OTHER, "inherit": ONE}, "the default changes nothing"


@pytest.mark.parametrize("make", ["build_store", "serve_store"])
def test_a_store_without_an_engine_runs_on_the_cpus_of_its_config(make: str, reported: Reported) -> None:
    found = reported(
        f"""
import contextlib
from kvplug import Config, ConfigError, Registry
from kvplug.assembly import stores
with contextlib.suppress(ConfigError):  # this registry offers no store
    stores.{make}(Config.from_dict({{"thread_cpus": "{OTHER[0]}", "stores": ["none"]}}), registry=Registry())
report(thread=in_thread())
"""
    )
    assert found == {"thread": OTHER}


def test_cpus_that_the_process_may_not_use_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        ResolvedConfig.to_build(Config.from_dict({"thread_cpus": "9000-9002"}), Registry())
    assert "thread_cpus: '9000-9002' was given" in str(refused.value)
    assert f"it may use {format_cpus(frozenset(ALL))}" in str(refused.value)
