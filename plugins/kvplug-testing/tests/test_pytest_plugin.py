"""pytest loads the kit's plugin everywhere: one small module, until an option or a suite needs more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvplug_testing

COLLECT = """
import sys, pytest
assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]) == 0
print(*sys.modules)
"""


def loaded(folder: Path, *arguments: str) -> set[str]:
    """The modules of a fresh process in which pytest has collected a file that knows nothing of kvplug."""
    (folder / "test_nothing.py").write_text("def test_nothing(): pass\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-c", COLLECT, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return {*done.stdout.splitlines()[-1].split()}


@pytest.mark.full
def test_it_loads_nothing_but_itself(tmp_path: Path) -> None:
    more = loaded(tmp_path) - loaded(tmp_path, "-p", "no:kvplug")
    assert {module for module in more if module.startswith("kvplug")} == {
        *("kvplug", "kvplug.door", "kvplug.kit", "kvplug_testing", "kvplug_testing.pytest_plugin")
    }
    assert not {module.partition(".")[0] for module in more} & {
        *("torch", "numpy", "hypothesis", "attrs", "attr", "msgspec", "pluggy", "rich", "click")
    }


def test_an_environment_inside_another_project_gets_nothing_of_its_conftest(tmp_path: Path) -> None:
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "mine"
    shutil.copytree(Path(kvplug_testing.__file__).parent, checkout / "env" / "kvplug_testing")
    (checkout / "conftest.py").write_text("raise ImportError('not of this project')\n")
    elsewhere.mkdir()
    (elsewhere / "pytest.ini").write_text("[pytest]\n")
    (elsewhere / "conftest.py").write_text("print('my conftest')\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "--collect-only", "-q", "--kvplug-transport", "pipe:memory"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout / "env"), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_a_tensor_of_each_dtype" in done.stdout and "my conftest" in done.stdout
