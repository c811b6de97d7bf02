"""The lesson about the first plugin works as it is written: it is installed, seen working, and tested."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
LESSON = TUTORIALS / "first-plugin"
PAGE = (TUTORIALS / "first-plugin.md").read_text(encoding="utf-8")


KVPLUG = ("-c", "from kvplug.cli.main import main; main()")
INSTALL = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-t", "site")


def run(folder: Path, *command: str) -> str:
    """A command of the lesson, in its folder."""
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_shows_every_file() -> None:
    shown = set(re.findall(r"<!-- code: first-plugin/(\S+) -->", PAGE))
    assert shown == {path.name for path in LESSON.iterdir() if path.is_file()}


def test_it_is_installed_seen_and_tested(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="what builds the lesson's package")
    folder = tmp_path / "kvplug-print"
    shutil.copytree(LESSON, folder, ignore=shutil.ignore_patterns("__pycache__"))
    run(folder, *INSTALL, ".")
    (folder / "kvplug_print.py").unlink()  # only the installed one counts
    assert re.search(r"^  print\b", run(folder, *KVPLUG, "list"), re.M)
    printed = run(folder, "see.py")
    assert f"$ python see.py\n{printed}```" in PAGE
    checked = run(folder, *KVPLUG, "check", "print")
    assert f"$ kvplug check print\n{checked}```" in PAGE
    assert " passed" in run(folder, "-m", "pytest", "-p", "no:cacheprovider", "test_print.py")
