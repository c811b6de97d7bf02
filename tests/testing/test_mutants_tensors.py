"""Every fault that is known is caught by a test of the law that it breaks, and every law has one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvplug.testing.laws import LAWS
from kvplug.testing.scorecard import Outcome, Scorecard, from_json

FOLDER = Path(__file__).with_name("mutants")
FILES = sorted(path for path in FOLDER.glob("*.py") if path.name != "conftest.py")
ROOT = Path(__file__).parents[2]
LIFE_S = 900
"""Of a process that judges a file of them."""


@cache
def mutants(path: Path) -> dict[str, Any]:
    """The mutants of a file: classes that say which laws they break."""
    spec = importlib.util.spec_from_file_location(f"mutants_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type) and getattr(cls, "breaks", ())
    }


BREACHES = [
    pytest.param(path, name, id_, id=f"{path.stem}: {name} breaks {id_}")
    for path in FILES
    for name, cls in mutants(path).items()
    for id_ in cls.breaks
]


def judge(path: Path, folder: Path) -> tuple[Scorecard, str]:
    """Let the kit judge all mutants of a file, in a process of its own. Returns what it printed, too."""
    report = folder / f"{path.stem}.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += ["--kvplug-level", "full", "--kvplug-report", str(report), str(path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIFE_S,
        check=False,
        cwd=folder,
        # What the mutants reach is measured by nobody: that takes as long again.
        env={key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")},
    )
    assert report.exists(), done.stdout + done.stderr
    return from_json(report.read_text()), done.stdout


@pytest.fixture(scope="session")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the kit says of a file's mutants. They wait more than they work: four files are judged at once."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    paths = {spec.params["path"]: None for spec in asked if spec is not None and "path" in spec.params}
    with ThreadPoolExecutor(4) as pool:
        verdicts = {
            path: pool.submit(judge, path, tmp_path_factory.mktemp(path.stem))
            for path in paths
            if path in FILES
        }
        yield lambda path: verdicts[path].result()


@pytest.mark.timeout(2 * LIFE_S)
@pytest.mark.parametrize(("path", "name", "id_"), BREACHES)
def test_a_mutant_is_caught_by_a_test_of_its_law(judged: Any, path: Path, name: str, id_: str) -> None:
    card, said = judged(path)
    mine = [result for result in card.results if result.suite == name]
    assert mine, said
    caught = [result for result in mine if result.outcome is Outcome.FAILED and id_ in result.laws]
    assert caught, f"{mutants(path)[name].__doc__} Nobody noticed:\n{said}"


def test_there_are_at_least_thirty() -> None:
    assert sum(len(mutants(path)) for path in FILES) >= 30


def is_of_plugins(id_: str) -> bool:
    """A plugin is an installed package and no class: the faulty ones are in test_check_plugin.py."""
    return id_.startswith("PLUGIN-")


@pytest.mark.parametrize("id_", [id_ for id_ in LAWS if not is_of_plugins(id_)])
def test_a_law_has_a_mutant(id_: str) -> None:
    assert id_ in {law for path in FILES for cls in mutants(path).values() for law in cls.breaks}
