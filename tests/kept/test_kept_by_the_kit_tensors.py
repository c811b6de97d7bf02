"""The kit and the engine of today with plugins from the days of plugin API 1.0, as they were built then."""

from __future__ import annotations

import contextlib
import io
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplug_lab.installed_site import Site, enter
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Parent
from kvplug_testing.scorecard import from_json

pytest.importorskip("torch")

KEPT = Path(__file__).parent
ROOT = KEPT.parents[1]
SUBJECTS = {"pipe kept-transport", "store kept-store", "sink kept-sink"}
LAWS = ("END-1", "PIPE-3", "STORE-5", "STORE-7", "SINK-1")
"""A part of the laws: what a plugin uses under another name or in another way breaks them, in seconds."""

PROGRAM = """
import torch
from kvplug import Config, PeerGoneError, connect_pipe, listen_pipe
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call

def config(**options):
    return Config.from_dict({"transport": "kept-pipe", "timeout_s": 30, "options": {"kept-pipe": options}})

with listen_pipe(config(), "unix:") as server:
    joining = Call(lambda: connect_pipe(config(chunk_bytes="4 KiB"), server.contact))
    one, other = server.accept(), joining.result(30)
assert type(one).__module__ == "kvplug_kept.pipe"
tensor = torch.arange(300_000, dtype=torch.bfloat16).reshape(3, -1)
sending = Call(lambda: [one.send_tensor(each).wait(30) for each in (tensor, None)])
out = torch.empty_like(tensor)
assert other.recv_tensor(out=out) is out and torch.equal(out, tensor)
assert other.recv_tensor() is None
sending.result(30)
other.send_tensor(torch.tensor(42)).wait(30)
assert one.recv_tensor().item() == 42
one.close()
try:
    other.recv_tensor()
    raise AssertionError("it has received what was not sent")
except PeerGoneError:
    other.close()

given = {
    "connector": "kept-connector", "role": "both", "sinks": ["kept-sink"],
    "options": {"kept-sink": {"path": "lines"}, "kept-connector": {"folder": "nowhere"}},
}
with FakeEngine(Config.from_dict(given)) as engine:
    request = request_of("r", range(40))
    blocks, loaded, report = engine.load(request)
    assert not loaded and not report.invalid_block_ids
    engine.finish(request, blocks)
    assert engine.worker.layers == list(engine.layer_names)
    scheduler = engine.scheduler
    scheduler.context.stats.record("load", 100, 0.1)
assert scheduler.context.options.folder == "nowhere"
assert open("lines").read() == "kept-connector {'load': 1}\\n"
assert scheduler.calls[0] == ("match", "r", 40) and scheduler.calls[-1] == ("finished", "r", "finished")
assert {call[0] for call in scheduler.calls} == {"match", "alloc", "output", "finished"}
"""
"""Moves tensors between two ends of the pipe that shares nothing, and runs its connector in an engine."""


@pytest.fixture
def site(tmp_path: Path, fork_server: ForkServer) -> Site:
    return Site(tmp_path, lambda: fork_server)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "laws",
    [
        pytest.param(LAWS, id="a part of the laws"),
        # Two minutes. `tox run -e release` runs them.
        pytest.param((), id="all laws", marks=pytest.mark.slow),
    ],
)
def test_they_keep_the_laws(kept: Any, laws: tuple[str, ...]) -> None:
    arguments = [
        *("-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
        *("--kvplug-level", "quick", "--kvplug-report", "card.json"),
        *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # the kit is imported already
        *(("--hypothesis-profile", "dev") if laws else ()),
        *(f"--kvplug-law={law}" for law in laws),
        str(KEPT / "suites.py"),
    ]
    path = os.pathsep.join([*map(str, kept.path), os.environ.get("PYTHONPATH", "")])  # of its children
    run = f"{__file__}:run_pytest"
    code, printed = kept.forked(run, arguments, {"PYTHONPATH": path}, timeout_s=290)
    assert code == 0, printed
    card = from_json((kept.folder / "card.json").read_text())
    passed = Counter(result.subject for result in card.results if result.outcome == "passed")
    assert not {subject for subject in SUBJECTS if passed[subject] < 3}, passed


@pytest.mark.timeout(120)
def test_a_pipe_moves_tensors_both_ways_and_a_connector_serves_an_engine(kept: Any) -> None:
    kept.forked(f"{__file__}:run_program", PROGRAM, {})


def run_pytest(parent: Parent, arguments: list[str], *place: Any) -> tuple[int, str]:
    """In a child: returns the exit code of pytest and what it prints."""
    enter(*place)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = pytest.main(arguments)
    return int(code), printed.getvalue()


def run_program(parent: Parent, program: str, *place: Any) -> None:
    """In a child."""
    enter(*place)
    exec(program, {"__name__": "__main__"})  # noqa: S102 - the program is the test's own
