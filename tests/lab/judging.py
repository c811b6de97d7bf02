"""Judges mutants: what a file of them contains, how the kit judges it, and which tests have caught a mutant.

A test has caught a mutant when it fails with it, for a reason that is a breach (``mutants/conftest.py``), and
passes without it in the same process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvplug_testing.scorecard import Outcome, Scorecard, from_json

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = Path(__file__).parent / "mutants"
MATRIX: Final = Path(__file__).with_name("matrix.jsonl")
"""What ``matrix.py`` has found last."""
FILES: Final = sorted(path for path in FOLDER.glob("*.py") if path.name != "conftest.py")
LIFE_S: Final = 900
"""Of a process that judges a file of mutants."""
NOT_RUN: Final = "not run: three other tests of the mutant have hung"
"""Why a test is skipped that would only hang, too."""

Results = dict[str, Mapping[str, Any]]
"""By mutant (``"stores.TestX"``): the digest of what was judged, and by law the tests that have caught it, in
the order in which they ran.
"""


def results_of(path: Path) -> Results:
    """The results in a file. A last line that a killed program has left half written is passed over."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found[result["mutant"]] = result
    return found


@cache
def classes(path: Path) -> dict[str, Any]:
    """The classes of a file."""
    spec = importlib.util.spec_from_file_location(f"mutants_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {name: cls for name, cls in vars(module).items() if isinstance(cls, type)}


def mutants(path: Path) -> dict[str, Any]:
    """The mutants of a file: classes that name the laws that they break."""
    return {name: cls for name, cls in classes(path).items() if getattr(cls, "breaks", ())}


def controls(path: Path) -> dict[str, Any]:
    """The classes of a file that have no fault, and are judged as its mutants are."""
    return {name: cls for name, cls in classes(path).items() if getattr(cls, "is_control", False)}


def controls_of(path: Path, name: str) -> list[str]:
    """The controls of a mutant, at least one: they have a base class of its."""
    mutant = mutants(path)[name]
    found = [other for other, cls in controls(path).items() if issubclass(mutant, cls.__base__)]
    assert found, f"{name} has no control"
    return found


def judge(
    path: Path, folder: Path, *names: str, more: tuple[str, ...] = (), timeout_s: float = LIFE_S
) -> tuple[Scorecard, str]:
    """Let the kit judge the classes of a file with these names in a process of its own.

    What the mutants reach is not measured for coverage: that takes as long again. Returns the scorecard, and
    what the process printed.
    """
    report = folder / f"{path.stem}.json"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
        *("--kvplug-level", "long", "--kvplug-report", str(report)),
        *(*more, *(f"{path}::{name}" for name in names)),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=folder, env=environment
    )
    assert report.exists() and done.returncode in (0, 1), done.stdout + done.stderr
    return from_json(report.read_text()), done.stdout


def catching(path: Path, name: str, id_: str, card: Scorecard) -> set[str]:
    """The tests of a law that have caught a mutant: it has failed them, and its controls pass them."""
    found = {
        result.test
        for result in card.results
        if result.suite == name and result.outcome is Outcome.FAILED and id_ in result.laws
    }
    for control in controls_of(path, name):
        found &= {
            result.test
            for result in card.results
            if result.suite == control and result.outcome is Outcome.PASSED
        }
    return found


def failures_of_controls(path: Path, card: Scorecard) -> list[str]:
    """What the controls of a file have failed. Then nothing is known of its mutants."""
    return [
        f"{result.suite} has no fault and fails {result.test}: {result.reason}"
        for result in card.results
        if result.suite in controls(path) and result.outcome is Outcome.FAILED
    ]


def reason_without_hosts(name: str, card: Scorecard) -> str:
    """Why tests of a mutant that need two hosts could not run; empty if they did, or there are none."""
    reasons = [result.reason for result in card.results if result.suite == name]
    return next((each for each in reasons if each.startswith("cross_host is not judged")), "")
