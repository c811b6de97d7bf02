"""What ``kvplug new`` generates passes its own tests: installed beside this kvplug, and in its own tox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplug.cli.new import COMMANDS

pytest.importorskip("copier", reason='kvplug new needs copier (pip install "kvplug[scaffold]")')

ROOT = Path(__file__).parents[2]
KIT = ROOT / "plugins/kvplug-testing"
CPU = ROOT / "plugins/kvplug-cpu"  # the generated communicator needs its pipe
LOOKUP = ROOT / "plugins/kvplug-lookup"  # the generated connector needs its lookup buffer
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*command: str | Path, cwd: Path, timeout: float = 500.0, **environ: str) -> str:
    ours = ("KVPLUG_", "TOX_", "COVERAGE_")  # what the package's tests reach is not what ours do
    clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    done = subprocess.run(
        command, cwd=cwd, env=clean | environ, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-5000:]
    return done.stdout


def generate(what: str, folder: Path, name: str = "gentle-breeze") -> Path:
    run(sys.executable, "-m", "kvplug.cli", "new", what, name, cwd=folder)
    return folder / f"kvplug-{name}"


def judge(*packages: Path, timeout: float = 500.0, level: str) -> list[Any]:
    """Install the packages beside this kvplug and run their own tests, in one process."""
    folder = packages[0].parent
    site, report = folder / "site", folder / "card.json"
    run(
        *PIP,
        *("install", "--no-deps", "--no-build-isolation", "--no-index", "--target", site),
        *packages,
        cwd=folder,
    )
    run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=error"),
        *("--import-mode=importlib", "--kvplug-level", level, "--kvplug-report", report),
        *(package / "tests" for package in packages),
        cwd=folder,
        timeout=timeout,
        PYTHONPATH=os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        PYTHONDONTWRITEBYTECODE="1",
    )
    results: list[Any] = json.loads(report.read_text())["results"]
    assert {result["outcome"] for result in results} <= {"passed", "skipped"}
    return results


# The environment `generated` runs every test of a transport, in the tox that comes with it.
BESIDE_IT = [what for what in COMMANDS if what != "transport"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_is_generated_passes_its_own_tests(tmp_path: Path) -> None:
    """Each kind in one process at the lowest level, which takes as long as one of them at the default one."""
    pytest.importorskip("torch")
    results = judge(
        *(generate(what, tmp_path, f"gentle-{what}") for what in BESIDE_IT), timeout=800, level="quick"
    )
    judged = Counter(result["subject"].rpartition("gentle-")[2] for result in results)
    assert judged.keys() == {*BESIDE_IT} - {"command"}  # which has tests of its own, and no suite
    assert min(judged.values()) >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", COMMANDS)
def test_what_is_generated_passes_its_own_tox(what: str, tmp_path: Path) -> None:
    """With the wheel of this tree; everything else comes from where pip is told to look."""
    pytest.importorskip("tox", reason="tox is not installed in this environment")
    wheels = tmp_path / "wheels"
    run(
        *PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT, KIT, CPU, LOOKUP, cwd=tmp_path
    )
    python = f"py{sys.version_info[0]}{sys.version_info[1]}"
    said = run(
        *(sys.executable, "-m", "tox", "run", "-e", python),
        cwd=generate(what, tmp_path),
        timeout=1700,
        PIP_FIND_LINKS=f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}".strip(),
        PIP_CONSTRAINT=str(ROOT / "constraints.txt"),
    )
    assert "congratulations" in said
