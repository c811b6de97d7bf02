"""What ``kvplug new`` generates passes its own tests: installed beside this kvplug, and in its own tox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("copier", reason='kvplug new needs copier (pip install "kvplug[scaffold]")')

ROOT = Path(__file__).parents[2]
KIT = ROOT / "plugins/kvplug-testing"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*command: str | Path, cwd: Path, timeout: float = 500.0, **environ: str) -> str:
    ours = ("KVPLUG_", "TOX_", "COVERAGE_")  # what the package's tests reach is not what ours do
    clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-5000:]
    return done.stdout


def generate(what: str, folder: Path) -> Path:
    run(sys.executable, "-m", "kvplug.cli", "new", what, "gentle-breeze", cwd=folder)
    return folder / "kvplug-gentle-breeze"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("connector", marks=pytest.mark.full),
        pytest.param("store", marks=pytest.mark.full),
        # The environment `generated` runs every test of a transport, in the tox that comes with it.
        pytest.param("transport", marks=pytest.mark.slow),
    ],
)
def test_what_is_generated_passes_its_own_tests(what: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    package = generate(what, tmp_path)
    site, report = tmp_path / "site", tmp_path / "card.json"
    run(
        *PIP,
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        site,
        package,
        cwd=tmp_path,
    )
    run(
        *(
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--kvplug-report",
            report,
        ),
        cwd=package,
        PYTHONPATH=os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        PYTHONDONTWRITEBYTECODE="1",
    )
    results = json.loads(report.read_text())["results"]
    assert len(results) > 10
    assert {result["outcome"] for result in results} <= {"passed", "skipped"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", ["transport", "connector", "store"])
def test_what_is_generated_passes_its_own_tox(what: str, tmp_path: Path) -> None:
    """With the wheel of this tree; everything else comes from where pip is told to look."""
    pytest.importorskip("tox", reason="tox is not installed in this environment")
    wheels = tmp_path / "wheels"
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT, KIT, cwd=tmp_path)
    python = f"py{sys.version_info[0]}{sys.version_info[1]}"
    said = run(
        *(sys.executable, "-m", "tox", "run", "-e", python),
        cwd=generate(what, tmp_path),
        timeout=1700,
        PIP_FIND_LINKS=f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}".strip(),
        PIP_CONSTRAINT=str(ROOT / "constraints.txt"),
    )
    assert "congratulations" in said
