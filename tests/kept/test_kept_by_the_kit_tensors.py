"""The kit of today judges plugins from the days of plugin API 1.0, as their wheels were built then."""

from __future__ import annotations

import subprocess
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplug_testing.scorecard import from_json

pytest.importorskip("torch")

KEPT = Path(__file__).parent
ROOT = KEPT.parents[1]
AT_LEAST = {
    "pipe kept-transport": 20,
    "store kept-store": 10,
    "sink kept-sink": 12,
}
"""How many tests of each subject pass: with fewer, the laws below say little."""
LAWS = ("PIPE-2", "PIPE-4", "PIPE-7", "END-1", "STORE-6", "STORE-7", "STORE-10", "SINK")
"""A part of the laws: what a plugin uses under another name or in another way breaks them, in seconds."""
FEW = ("END-1", "STORE-7", "SINK-3")

BREAKS = """
import kvplug.engine, kvplug.transport, kvplug.transport.store.header

window = kvplug.transport.SendWindow
window.wait_until_it_fits = window.wait_for_room  # a method gets another name
del window.wait_for_room
del kvplug.transport.store.header.split_header  # a function is gone
del kvplug.engine.Sink.close  # a body that subclasses inherit is gone
"""
"""For each kept plugin a change of the core that breaks it."""


@pytest.fixture
def kept(site: Any) -> Any:
    """A place where all are installed, as pip unpacks such wheels."""
    for path in KEPT.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(site.folder / "site")
    return site


def judged(
    site: Any, laws: tuple[str, ...], *arguments: str, timeout_s: float
) -> tuple[subprocess.CompletedProcess[str], Counter[Any]]:
    """A run of the kit, and how many tests had which outcome, by subject."""
    done = site.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")),
        *("--rootdir", str(ROOT), "--kvplug-level", "quick", "--kvplug-report", "card.json"),
        *(("--hypothesis-profile", "dev") if laws else ()),
        *(f"--kvplug-law={law}" for law in laws),
        *(*arguments, str(KEPT / "suites.py")),
        timeout_s=timeout_s,
    )
    card = from_json((site.folder / "card.json").read_text())
    return done, Counter((result.subject, result.outcome) for result in card.results)


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
    done, outcomes = judged(kept, laws, timeout_s=290)
    assert done.returncode == 0, done.stdout
    assert not {subject: few for subject, few in AT_LEAST.items() if outcomes[subject, "passed"] < few}


def test_the_laws_are_broken_by_what_the_api_must_not_do(kept: Any) -> None:
    (kept.folder / "breaks.py").write_text(BREAKS)
    done, outcomes = judged(kept, FEW, "-p", "breaks", "--tb", "line", timeout_s=100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {subject for subject, outcome in outcomes if outcome == "failed"} == {*AT_LEAST}
