"""What the rehearsal of a release takes from the README is there."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return importlib.import_module("rehearse")


def test_the_readmes_lines_install_every_package(rehearse: Any) -> None:
    lines = rehearse.lines_of_the_readme()
    assert lines[0] == "python3 -m venv env"
    named = [word for line in lines[1:] for word in line.removeprefix("env/bin/pip install ").split()]
    projects = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    packages = {tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"] for path in projects}
    assert len(named) == len(set(named)) and set(named) == packages | {"numpy"}
